"""The figures of the paper that Paceline follows, made again by Paceline's own simulator.

    figures/            one file a figure: what the paper says, what we found, whether they agree
    timing.py           the time of updates, from predict/simulation.py
    training.py         loss against time and updates, from predict/rehearsal.py
    bounds.py           bounds on the error after so many updates, and on their time
    tasks.py            what the paper trains
    page.py             findings -> results/paper.md and its pictures
    __main__.py         all of it, with progress: ``make paper``

Source: S. Dutta, G. Joshi, S. Ghosh, P. Dube, P. Nagpurkar, "Slow and Stale Gradients Can Win the
Race: Error-Runtime Trade-offs in Distributed SGD", AISTATS 2018 (PMLR 84:803-812).
"""
