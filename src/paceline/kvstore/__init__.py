"""Values by key that threads and processes push to and pull from, without a run.

    kvstore    the class that users hold          checks   what they hand in
    entries    all keys as one process sees them  entry    the three blocks of one key
    updaters   what a push does to a value        index    which keys there are, in shared memory
    shards, locks   who may write, also after a death

It must not know runs, members or protocols.
"""
