"""From a module to a graph of work, and from a cut of that graph to parts that run.

    tracing      which operations a module has; pieces: which of them must stay together
    measuring    what each piece takes and keeps on this machine
    clocks       by the clock, or counted; what a message costs, where nobody has measured one
    parts        the parts of a cut as modules
    late_weights gradients of linear layers that are computed once for several micro-batches
    channels     pairs of layers that can be split over channels

    module -> tracing -> TracedModel -> measuring -> WorkGraph -> partition.find_placement
                              |                                          |
                              +----------------> parts <-----------------+
                                                   |
                                       a module a part, as it is run

What can be cut is decided by `partition/`, which knows no tensors. This room must not know workers
or messages: who runs the parts is elsewhere.
"""
