"""The torchrun engine: the ranks that ``torchrun``, ``srun`` or ``mpirun`` started are the members.

    torchrun -> every rank runs the script -> paceline.connect()

    rank 0   thread   controller <-> TorchrunEngine          engine.py (started by launch/ranks.py)
                          ^  |
               queue "up" |  | queue "down/K"                post.py       a few messages an epoch
                          |  v
    rank K   main     StoreExchange -> PeerRounds            member.py     words, lines, the store
                          lines: once a round                averaging.py  with the last bucket
                          bytes: all-reduce, or a schedule   buckets.py    during the backward pass,
                                                                           bucket by bucket
                          or in memory that all map          symmetric_memory.py  on one machine
                                                             group.py      gloo between CPUs, NCCL
                                                                           between GPUs
             thread   a receive from rank K + 1, which fails when that rank dies

Messages go through the ``TCPStore`` that torch's own process groups use for rendezvous, bytes
through torch's own groups; on one machine gradients are summed, and lines and a split model's
messages exchanged (exchange/mapped.py), in memory that all ranks map.
``world.py`` reads the rank from the environment, ``place.py`` reaches the store, ``life.py`` runs a
process from ``connect`` to its end.

One controller, a thread of rank 0, decides for all ranks, as on one machine: clocks, signals and
the disk are read in one place. If any rank dies the run ends; torchrun restarts it
(``--max-restarts``), and it continues from the newest checkpoint.

Each member has its own control words and store; on a CPU its model lives in that store's block.
The words that others need travel with the lines of a round; the main member's initial layout is
broadcast. These files must not know protocols.
"""
