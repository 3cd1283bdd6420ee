"""What ``--fast auto`` tries, and how it is measured.

    candidate, candidates   the contract and the table, of:
    ahead, allocator, channels_last, compilation, kernels, loading, precision, threads
    supply, process, deadline   what a trial computes on, changes in the process, and its end
    trial, arm, pairs       measured in turn on copies of the user's objects
    fast, remembered        what comes of the flags, and what is kept for this model and machine

It must not know runs of several workers.
"""
