"""The deciding side of a run: events go to the coordinator, its orders to members as messages.

    controller      hears every event, and has a handler for each
    state           one run: its coordinator, trace and members; roster: who takes part
    describe        what members prepared, and the plan that follows
    collective      how the gradients of peers are summed
    epochs          the start and end of epochs        pushes   members' reports of their work
    peers           rounds between peers               calls    evaluations and sums of all members
    checkpointing   when, what, and by which member    progress what a run shows while it trains
    departures      how members end                    respawn  new members in their place
    streams         which member reads a stream, whose samples have no numbers
    liveness        members without a sign of life     silence  whether one stalls, and the message
    shutdown        a stop by the user or by a metric
    dispatch        sends orders as messages           faults   injected faults
    trials          several runs of the same members, one after another

It must not know sockets or tensors, how a process is started, nor how a report is shown.
"""
