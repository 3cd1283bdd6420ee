"""Values by key that threads and processes push to and pull from, without a run.

    kvstore    the class that users hold
    entries    all keys as one process sees them: found, added, pushed to
    updaters   what is handed in, checked; what a push does to a value
    index      which keys there are, in shared memory; locks that a death opens again

It must not know runs, members or protocols.
"""
