"""What a run is put through: how slow its workers are made, and how they fail.

    world           all of it as one value: delays, phases, links, cores, machine, absences
    delays, distributions, phases    how much longer a step takes, and when
    cores, links, machine            what workers share, and what a push costs
    absences        who starts late, leaves and returns
    faults          who dies, stops or slows down, and when
    holdup, mishaps                  delays and faults of one live worker, step by step

It must not know who waits for it: given a random generator it answers with seconds.
"""
