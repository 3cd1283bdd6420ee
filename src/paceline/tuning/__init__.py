"""What ``--fast auto`` tries, and how it is measured.

    candidate               the contract, and what a candidate is tried on
    candidates              all of them, and their order
    allocator               what one of them does: the process's heap
    trial, pairs            measured in turn on copies of the user's objects
    fast, remembered        what comes of the flags, and what is kept for this model and machine

It must not know runs of several workers.
"""
