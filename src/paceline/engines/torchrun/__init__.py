"""The torchrun engine: ranks that ``torchrun``, ``srun`` or ``mpirun`` started are the members.

    torchrun -> every rank runs the script -> paceline.connect()

    rank 0   thread   controller <-> TorchrunEngine          engine.py (started by launch/ranks.py)
                          ^  |
               queue "up" |  | queue "down/K"                post.py       a few messages an epoch
                          |  v
    rank K   main     StoreExchange -> PeerRounds            member.py     words, lines, the store
                          lines: once a round                averaging.py  with the last bucket
                          bytes: all-reduce, or a schedule   buckets.py    while the backward pass
                                                                           computes, part by part
                                                             group.py      gloo between CPUs, NCCL
                                                                           between GPUs
             thread   a receive from rank K + 1, which breaks when that rank dies

Messages go through the ``TCPStore`` at which torch's process groups meet, and bytes through torch's
groups; ranks are connected in no other way. ``world.py`` finds a process's rank in the environment,
``place.py`` connects to the store, ``life.py`` runs a process from ``connect`` to its end.

One controller, a thread of rank 0, decides for all, as on one machine; so clocks, signals and the
disk are read once. When any rank dies the run ends; torchrun restarts it (``--max-restarts``), and
it continues from the newest checkpoint.

Each member has control words and a store of its own; on a CPU its model is in that store's block.
Words that others must see travel with the lines of a round; what the main member has laid out is
broadcast. These files must not know protocols.
"""
