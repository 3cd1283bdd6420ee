"""The data sets that Paceline knows, and the way of a user's samples into a training loop.

    catalogue   what there is, and where it is looked for
    checked     one file, read and compared with its sum
    fetch       the ways to get what is not here: sources, outside
    idx         the format of the files
    arrays      samples by number, and by the batch
    load        a name -> training and test samples
    choice      what to use where the wished one is not here
    loader      the user's DataLoader lease by lease; plain: where one worker trains alone
    order       an epoch's order, drawn once; listed: all its positions
    feed        loader workers that fetch ahead; transfer: to an accelerator; trees: of batches
    likeness, digests   whether workers hold the same data

It must not know which network is trained on them, nor with how many workers.
"""
