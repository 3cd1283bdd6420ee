"""The command line: verbs, each of which parses, calls and prints.

    run          train, launch                     protocols    plan, compare: which one
    recorded     report, replay: a run that was    simulate     one, in virtual time
    machine      data, config: what is here        flags        what verbs share
    bench, tune, export: one device

A verb is a line in the table of ``app.py`` and a function, or an app of several, in the file that
is named there, which is imported only when the verb is used.
"""
