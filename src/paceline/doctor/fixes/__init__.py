"""Write fixes into a script: choose the edits, prove them, apply them, undo them.

    text --every rule that mends--> Edit, Edit ... --recorded runs--> proved edits --> diff

    asked       ``--fix`` for one script, from reading to writing; report: the result
    mending     the edits of rules and prices; pure
    proving     compares the losses and gradients of 20 steps to the last bit, before and after
    applying    writes the file, and puts it back

A fix that changes the mathematics has no mend, and is left to the user. This package must not know
what a rule looks for.
"""
