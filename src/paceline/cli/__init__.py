"""The command line: verbs, each of which parses, calls and prints.

    run          train, launch                     simulate, compare, plan   a prediction
    recorded     report, replay: a run that was    bench, tune, export       one device
    machine      data, config: what is here        flags                     what verbs share

A verb is a line in the table of ``app.py`` and a function, or an app of several, in the file that
is named there, which is imported only when the verb is used.
"""
