"""A run that is predicted: before anything is paid for, with what was measured.

    profiles           what a short real run tells of a machine
    step_times         of its trace, step by step
    simulation         settings in, a protocol in virtual time, a forecast out
    rehearsal          a whole training run in virtual time
    race, pursuit      protocols that race, with real gradients
    advice             which protocol with how many pushes an update
    splitting          a model over several workers: the cut, and the table of all splits
    split_models       of that: the model, also without numbers
    split_costs        and what it takes here: measured, messages timed
    measuring          of that: pieces, and the model as one, at each batch that a split has
    neighbours         processes that compute beside what is measured
    exchanges          and what all of them do together, timed
    comparison         several protocols, one after the other

It must not know how anything is printed.
"""
