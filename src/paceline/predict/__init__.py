"""Predictions of a run before it starts, from measured times.

    profiles           the times measured in a short real run
    step_times         the same step by step, from its trace
    simulation         settings in, a protocol in virtual time, a forecast out
    rehearsal          a whole training run in virtual time
    race, pursuit      protocols that race, with real gradients
    advice             which protocol with how many pushes an update
    splitting          a model over several workers: the cut, and the table of all splits
    split_models       its model, also without numbers
    split_costs        its costs on this machine: computing measured, messages timed
    measuring          the measurement: pieces, the whole model, and all workers at once
    neighbours         processes that compute beside the measured one
    exchanges          messages of all of them at the same time, timed
    comparison         several protocols, one after the other

It must not know how anything is printed.
"""
