"""Checkpoints, from which a run can be resumed; each is complete or not there at all.

    due          when a checkpoint is due (30s, 500 updates, 1 epoch), and in which folder
    folder       the folder of the last ones: written under another name, synced, renamed, verified
    writer       the process beside the run that writes the pinned version, and its queue
    state        a model as ``pace.save`` writes it, and the state of members, without pickle
    best         the best models by a metric, which are kept
    resumption   resuming a run that was cut off

This package must not know members, protocols or messages.
"""
