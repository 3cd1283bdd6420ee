"""The parameters of a run in memory that its members share.

    parameter_store    push, pull, versions, updates; sums: where pushes are added
    layout             where every tensor lies in a block
    optimizer          the user's own, applied in a block; optimizer_copy: its class once more
    replaced           what a step of a class of the user's own puts in the place of what was there
    fragments          which parameters an update is of
    joint              several optimizers as one
    control            the words by which members see each other; memory: what they lie in
    versions           what goes with a version, in those words
    clip               what an update clips its gradient to
    means              of gradients and buffers; differences and distances of models
    fences             the order in which writes are seen

It must not know members, messages or protocols.
"""
