"""Training processes of this user: what runs, what it holds, what was left behind, and its end.

                   /proc, nvidia-smi
                          |
    reading -> snapshot   what each process is, as data: nothing is decided while it is read
                          |
    judgement    PURE     what trains, whose work it is, why it is a ghost
    targets      PURE     what may be ended, and why the rest is left alone
                          |
         +----------------+----------------+
         |                                 |
    table        what `paceline ps`   ending       TERM, wait, KILL, to who is still the process
                 prints                            that was seen; then what they left is freed
    devices      what accelerators say of themselves, and one that is busy without a process
    freeing      `paceline.free_memory()`: inside of one process, nothing is ended

What a process is part of is told by *work*, not by parents: a command that a training script has
begun (a viewer, a shell, an MPI daemon) is a child and no part of it; a loader worker that was
adopted by init is no child and is one. Whose parent is gone is a ghost only where it cannot have
been meant so:

    loader worker, spawned part, rank of torchrun,  whoever needs its parent, and has lost it
    fork server
    forked part                     that has lost its parent, does nothing, listens at no port,
                                    and is no daemon by all that can be seen
    a part of a ghost               with it
    a script, a notebook            never: who starts one with nohup means it; name it to end it

A number is not an identity: a process is its number *and* the tick at which it began, so one whose
number now belongs to another is never sent anything. It must not know runs or settings.
"""
