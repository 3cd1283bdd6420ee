"""Turn a module into a graph of work, and a cut of that graph into parts that run.

    tracing      the operations of a module; pieces: which of them must stay together
    measuring    the time and memory of each piece on this machine
    clocks       times, measured or counted; the cost of a message on this machine
    parts        the parts of a cut as modules
    late_weights gradients of linear layers that are computed once for several micro-batches
    channels     pairs of layers that can be split over channels

    module -> tracing -> TracedModel -> measuring -> WorkGraph -> partition.find_placement
                              |                                          |
                              +----------------> parts <-----------------+
                                                   |
                                       one module for each part, as it is run

`partition/` decides what to cut; it knows no tensors. This package must not know workers or
messages: who runs the parts is decided elsewhere (spread/).
"""
