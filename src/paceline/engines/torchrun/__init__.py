"""The torchrun engine: the ranks that ``torchrun``, ``srun`` or ``mpirun`` began are the members.

    torchrun -> every rank runs the script -> paceline.connect()

    rank 0   thread   controller <-> TorchrunEngine          engine.py (begun by launch/ranks.py)
                          ^  |
               queue "up" |  | queue "down/K"                post.py       a few messages an epoch
                          |  v
    rank K   main     StoreExchange -> PeerRounds            member.py     words, lines, the store
                          lines: once a round                averaging.py  with the last bucket
                          bytes: all-reduce, or a schedule   buckets.py    while the backward pass
                                                                           computes, part by part
                                                             group.py      gloo between CPUs, NCCL
                                                                           between GPUs
             thread   a receive from rank K + 1, which breaks where that one dies

Messages go through the ``TCPStore`` that torch's own process groups meet at; bytes through torch's
own groups; there is no other way between ranks. ``world.py`` reads from the environment who a rank
is, ``place.py`` reaches the store, ``life.py`` leads a process from ``connect`` to its end.

The one controller decides for all, as on one machine: what a clock, a signal or a disk says is said
once. It is a thread of rank 0. Where any rank dies the run ends: torchrun begins it again
(``--max-restarts``), and it goes on from the newest checkpoint.

Each member has words and a store of its own; on a CPU its model lives in that store's block. What
others must see of them travels with the lines of a round; what the main member has laid out is
broadcast. These files must not know protocols.
"""
