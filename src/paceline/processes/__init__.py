"""The user's training processes: what runs, what it holds, what was left behind, and how to end it.

                   /proc, nvidia-smi
                          |
    reading -> snapshot   what each process is, as data: nothing is decided while it is read
                          |
    judgement    PURE     what trains, which work it belongs to, why it is a ghost
    targets      PURE     what may be ended, and why the rest is left alone
                          |
         +----------------+----------------+
         |                                 |
    table        what `paceline ps`   ending       TERM, wait, KILL, to processes that are still
                 prints                            those that were seen; then frees what they left
    devices      the state of accelerators, and which are busy although no process uses them
    freeing      `paceline.free_memory()`: inside one process, ends nothing

A process belongs to a *work* by its role, not by its parent: a command that a training script has
started (a viewer, a shell, an MPI daemon) is its child but not part of its work; a loader worker
that init has adopted is not its child any more, but still part of its work. A process whose parent
is gone is a ghost only if that cannot be intended:

    loader worker, spawned part,    if it has lost its parent, which it needs
    rank of torchrun, fork server
    forked part                     if it has lost its parent, is idle or stopped, listens at no
                                    port, and does not look like a daemon
    part of a ghost                 always
    script, notebook                never: it may run with nohup on purpose; name it to end it

A number is not an identity: a process is identified by its number *and* the tick at which it began,
so a later process with the number of an earlier one is never signalled by mistake. This package
must not know runs or settings.
"""
