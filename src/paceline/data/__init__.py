"""The data sets that Paceline knows, and loading a user's samples into a training loop.

    catalogue   the known data sets, where they are searched for, and checks of their files
    fetch       fetch a missing data set, or choose another; sources: the ways to get it
    arrays      a name -> training and test samples, by number and by the batch
    loader      the user's DataLoader, lease by lease
    order       an epoch's order: all its positions, drawn once
    positions   positions, listed or drawn as far as they are needed
    numbers     a loop without a loader: its numbers as the samples of one
    streamed    a stream's mini-batches by number; stream_source: the user's stream
    stream      a pass, read once, a bounded way ahead, and kept; reader: in its own process
    serving     send its mini-batches to all members of a machine
    frames      a mini-batch as bytes in an unnamed file
    feed        loader workers that fetch leases ahead; copies to an accelerator
    likeness    whether workers hold the same data
    own_iteration  loader classes whose iteration changes batches

It must not know which network is trained on them, nor with how many workers.
"""
