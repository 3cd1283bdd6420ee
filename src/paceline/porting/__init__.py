"""Reads a user's training script, and rewrites it for Paceline.

    porting            what ``launch`` tells the user of a script
    check              what ``launch --check`` answers: a diff, or why there is none
    project            a script, and the file of its project that has the loop, as one text
    reading            what a script's names mean, and what all its workers would write at once
    tree, dataflow     its syntax tree, which keeps comments and layout; where its values come from
    loops, parts       the loop that trains, and what `prepare` is given for it
    iterators, endless loops that take batches by next() or from an own class, and without end
    indexed            a loop over indices inside the loop over epochs
    counting           the number of updates of a loop without a loader
    uses               what the number of a loop's turn is used for
    together           what needs workers that step together
    leftovers          what a turn that is called off would leave to the next one
    whole_batch        what a loss computes from all samples of a batch together
    notes              the notes beside a diff
    refusals           what cannot be ported by adding lines
    rewrite            the passes that rewrite a script for Paceline
    around_step        clipping, and weights that are changed by hand, around a step
    group              removes torch's own process group
    accelerate, accumulation   remove Accelerate's accelerator

This package must not run any of the script; only the modules that rewrite import libcst.
"""
