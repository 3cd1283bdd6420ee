"""One run from its settings to its summary.

    launcher   the folder, the engine, the members, the end
    claim      which folder a run takes, and that it is alone there
    lives      when a run whose workers were all lost begins again

It must not know how orders are carried out.
"""
