"""Checkpoints: a run on disk that can be gone on with, whole or not there at all.

    every        when one is due: 30s, 500 updates, 1 epoch
    shelf        the folder of the last ones: written aside, synced, renamed, checked
    packed       what members remember (schedulers, random states, ...): JSON and tensors, no pickle
    desk         where requests to write are handed in
    scribe       the writer beside the run, which reads the pinned version out of shared memory
    resumption   a run that was cut off, and what it takes to go on with it
    model_file   a model alone, as ``pace.save`` writes it

This package must not know members, protocols or messages.
"""
