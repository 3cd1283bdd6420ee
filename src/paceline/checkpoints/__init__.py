"""Checkpoints: a run on disk that can be gone on with, whole or not there at all.

    every     when one is due: 30s, 500 updates, 1 epoch
    shelf     the folder of the last ones: written aside, synced, renamed, checked, never half there
    packed    what members remember (schedulers, random states, ...) as JSON and tensors: no pickle
    desk      where requests to write are handed in
    scribe    the writer beside the run, which reads the pinned version out of shared memory

This package must not know members, protocols or messages.
"""
