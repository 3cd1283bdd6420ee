"""The data sets that Paceline knows, and the way of their samples into a training loop.

    catalogue   what there is, and where it is looked for
    checked     one file, read and compared with its sum
    fetch       the ways to get what is not here
    idx         the format of the files
    arrays      samples by number, and by the batch
    load        a name -> training and test samples
    choice      what to use where the wished one is not here

It must not know which network is trained on them, nor with how many workers.
"""
