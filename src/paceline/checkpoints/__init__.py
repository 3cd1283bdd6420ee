"""Checkpoints: a run on disk that can be gone on with, whole or not there at all.

    due          when one is due (30s, 500 updates, 1 epoch), and which folder it goes to
    folder       the folder of the last ones: written aside, synced, renamed, checked
    writer       the process beside the run that writes the pinned version, and its queue
    state        a model as ``pace.save`` writes it, and what members remember, without pickle
    best         the best models by a metric, which stay
    resumption   a run that was cut off, and what it takes to resume it

This package must not know members, protocols or messages.
"""
