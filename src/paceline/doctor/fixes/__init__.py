"""Fixes written into a script: which, proved, applied, taken back.

    text --every rule that mends--> Edit, Edit ... --recorded runs--> those that are proved --> diff

    asked       one script, from its file to its file; report: what came of it
    mending     which edits there are, one a rule; pure
    proving     losses and gradients of 20 steps, to the last bit, before and after
    applying    the file: written, and put back

What changes the mathematics has no mend, and is left alone. This package must not know what a rule
looks for.
"""
