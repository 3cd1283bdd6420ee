"""One run from its settings to its summary.

    connecting ``paceline.connect``
    launcher   the folder, the engine, the members, the end
    lives      which folder a run takes, alone; what each member is told before it begins; when one
               whose workers were all lost begins again
    trials     runs of the same members, one after another, each in a folder of its own
    job        what a run of ranks is asked for, and the folder of its restarts
    ranks      the same where torchrun, srun or mpirun began the workers
    nodes      torchrun begun for the workers of several machines

It must not know how orders are carried out.
"""
