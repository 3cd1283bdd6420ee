"""Checkpoints: a run on disk that can be gone on with, whole or not there at all.

    every        when one is due: 30s, 500 updates, 1 epoch
    folder       the folder of the last ones: written aside, synced, renamed, checked
    places       which folder the next one goes to, and the last one where that takes nothing
    writer       the process beside the run that writes the pinned version, and its queue
    state        a model as ``pace.save`` writes it, and what members remember, without pickle
    resumption   a run that was cut off, and what it takes to go on with it

This package must not know members, protocols or messages.
"""
