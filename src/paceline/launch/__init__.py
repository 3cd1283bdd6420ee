"""One run from its settings to its summary.

    launcher   the folder, the engine, the members, the end
    members    what each member is told before it begins
    lives      which folder a run takes, alone; when one whose workers were all lost begins again

It must not know how orders are carried out.
"""
