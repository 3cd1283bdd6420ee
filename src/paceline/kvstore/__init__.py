"""Values by key that threads and processes push to and pull from, without a run.

    kvstore    the public class
    entries    all keys as one process sees them: find, add, push
    updaters   checks of pushed values, and the rules by which a push changes a value
    index      the list of keys in shared memory; locks that are released by a death

It must not know runs, members or protocols.
"""
