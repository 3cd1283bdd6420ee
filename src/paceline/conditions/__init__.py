"""What a run is put through: how slow its workers are made, and how they fail.

    world           all of it as one value: delays, phases, machine, links, and who is away
    delays          how much longer a step takes; distributions: of what
    slowness        who is slow always, or in phases, and how one live worker is made so
    machine         what computing costs, and the cores that workers share
    faults          who dies, stops or slows down, and when; of one live worker step by step

It must not know who waits for it: given a random generator it answers with seconds.
"""
