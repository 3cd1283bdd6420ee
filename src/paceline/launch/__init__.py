"""One run from its settings to its summary.

    launcher   the folder, the engine, the members, the end
    lives      which folder a run takes, alone; what each member is told before it begins; when one
               whose workers were all lost begins again
    trials     runs of the same members, one after another, each in a folder of its own

It must not know how orders are carried out.
"""
