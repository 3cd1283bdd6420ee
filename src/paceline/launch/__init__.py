"""One run from its settings to its summary.

    connecting ``paceline.connect``
    launcher   the folder, the engine, the members, the end
    lives      the folder that a run locks, what each member starts with, and when a run that lost
               all workers begins again
    trials     runs of the same members, one after another, each in a folder of its own
    job        the settings of a run of ranks, and the folder of its restarts
    ranks      a run whose workers were started by torchrun, srun or mpirun
    nodes      --nodes: ranks that torchrun starts, here or on several machines

It must not know how orders are carried out.
"""
