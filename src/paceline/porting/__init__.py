"""Reading a user's script: what it does, and how it becomes one for Paceline.

    porting            what ``launch`` says of it
    check              what ``launch --check`` says of it: a diff, or why there is none
    reading            what its text means, and what all its workers would write at once
    tree, dataflow     its tree, which keeps comments and layout; what flows where in it
    loops, parts       the loop that trains, and what `prepare` is given for it
    iterators, endless a loop that takes its batches by next(), and one of a loader without end
    indexed            a loop by an index inside the loop of an epoch
    counting           how many updates a loop without a loader makes
    uses               what a turn's number is used for
    together           what needs workers that step together
    leftovers          what a turn that is called off would leave to the next
    notes              what is said beside a diff
    refusals           what no lines can carry
    rewrite            the same script for Paceline, pass by pass
    around_step        clipping, and weights that are changed by hand, around a step
    group              without a process group of torch's own
    accelerate, accumulation   without an accelerator of Accelerate's

It must not run any of it; only what rewrites imports libcst.
"""
