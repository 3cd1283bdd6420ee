"""The same coordinator in virtual time: a run before any worker is paid for.

    engine      with ledger and trace          agenda      what happens next
    training    with real gradients            gradients, batched, versions, local_steps: its parts
    timing      only the timing                bulk, lean  two ways to it; counts: what comes of it
    replay      a recorded run made again      peers       as peers average
    evaluate    what a model makes of data

It must not know processes or messages.
"""
