"""The figures of the paper that Paceline follows, reproduced by Paceline's own simulator.

    figures/            one file per figure: the paper's numbers, ours, whether they agree
    timing.py           the time of updates, from predict/simulation.py
    training.py         loss against time and updates, from predict/rehearsal.py
    bounds.py           bounds on the error after a number of updates, and on their time
    tasks.py            what the paper trains
    page.py             results -> results/paper.md and its pictures
    __main__.py         everything, with progress: ``make paper``

Source: S. Dutta, G. Joshi, S. Ghosh, P. Dube, P. Nagpurkar, "Slow and Stale Gradients Can Win the
Race: Error-Runtime Trade-offs in Distributed SGD", AISTATS 2018 (PMLR 84:803-812).
"""
