"""The data sets that Paceline knows, and the way of a user's samples into a training loop.

    catalogue   what there is, where it is looked for, and whether a file is what it should be
    fetch       bring here what is not, or choose another; sources: the ways to get it
    arrays      a name -> training and test samples, by number and by the batch
    loader      the user's DataLoader lease by lease
    order       an epoch's order: all its positions, drawn once
    positions   listed, or drawn as far as they are asked for
    numbers     of a loop without a loader: the numbers of its draws, as the batches of one
    streamed    a stream's mini-batches by number; stream_source: the user's, as they come
    stream      read once, a bounded way ahead, and kept; reader: in a process of its own
    serving     what it gives, for all members of a machine
    frames      a mini-batch of it as bytes, in a file without a name
    feed        loader workers that fetch ahead, fed by leases or alone; copies to an accelerator
    likeness    whether workers hold the same data
    own_iteration  a loader class whose way of iterating changes batches

It must not know which network is trained on them, nor with how many workers.
"""
