"""What ``--fast auto`` tries, and how it is measured.

    candidate, candidates   the contract; all of them, and their order
    allocator, compilation  what two of them do: the process's heap, the model as compiled code
    supply                  what a trial computes on
    trial, pairs            measured in turn on copies of the user's objects
    fast, remembered        what comes of the flags, and what is kept for this model and machine

It must not know runs of several workers.
"""
