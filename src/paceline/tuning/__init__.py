"""The candidates of ``--fast auto``, and their measurement.

    candidate               the contract, and the subject of a trial
    candidates              all of them, in their order
    allocator               the heap setting of one of them
    compilation             the compiled training calls of another
    saved_state             what an optimizer saves, whatever was chosen
    trial, pairs            measurements in pairs on copies of the user's objects
    fast, remembered        the effect of the flags, and the outcome for this model and machine

It must not know runs of several workers.
"""
