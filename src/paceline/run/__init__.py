"""The deciding side of a run: events in, the coordinator asked, orders and messages out.

    controller      hears every event, and has a handler for each
    state           one run: its coordinator, trace and members; roster: who takes part
    describe        what members prepared, and the plan that follows
    collective      what sums the gradients of peers
    epochs          the borders of epochs              pushes   what members tell of their work
    peers           rounds among themselves            calls    evaluations and sums of all
    checkpointing   when, of what, by whom             progress what a run tells while it goes
    departures, respawn                                ends and new lives
    streams         who reads, where samples have no numbers
    liveness        who gives no sign of life          silence  whether it stalls; what is said
    shutdown        the end that a user asks for, or a metric
    dispatch        orders become messages             faults   those that were ordered
    trials          several runs of the same members, one after another

It must not know sockets or tensors, how a process is begun, nor how a report is shown.
"""
