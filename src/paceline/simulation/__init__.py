"""Runs a live run's coordinator in virtual time, before any worker is paid for.

    engine      a run with ledger and trace    agenda      the events to come
    training    with real gradients            gradients, model: its parts
    timing      only the timing                bulk        many updates at once, on arrays
    replay      a recorded run, made again     peers       gradients averaged as peers do

It must not know processes, nor how a message travels.
"""
