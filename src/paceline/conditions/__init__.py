"""The conditions of a run: how slow its workers are made, and how they fail.

    world           all conditions as one value: delays, phases, machine, links, absences
    delays          additional time per step; distributions: the classes that it is drawn from
    slowness        workers that are slow always or in phases, and delays of one live worker
    machine         what computing costs, and the cores that workers share
    faults          which workers die, stop or slow down, and when

It must not know who waits for it: given a random generator it answers with seconds.
"""
