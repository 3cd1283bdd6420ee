"""The same coordinator in virtual time: a run before any worker is paid for.

    engine      with ledger and trace          agenda      what happens next
    training    with real gradients            gradients, model: its parts
    timing      only the timing                bulk        by arrays
    replay      a recorded run made again      peers       as peers average

It must not know processes, nor how a message travels.
"""
