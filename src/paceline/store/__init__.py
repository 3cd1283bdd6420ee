"""The parameters of a run in memory that its members share.

    parameter_store    push, pull, versions, updates; sums: where pushes are added
    layout             where every tensor lies in a block
    optimizer          the user's own, applied in a block; optimizer_copy: twins of it
    replaced           tensors that a step of the user's own class replaces
    fragments          the parameters of an update, if it covers only a part of them
    joint              several optimizers as one
    control            the words by which members see each other; memory: the shared memory
    versions           counts, loss scales and norms of a version, in those words
    clip               how an update clips its gradient
    means              means of gradients and buffers; differences and distances of models
    fences             memory fences: the order in which writes are seen

It must not know members, messages or protocols.
"""
