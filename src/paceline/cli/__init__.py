"""The command line: verbs, each of which parses, calls and prints.

    run          train, launch, report, replay     protocols    plan, compare: which one
    machine      env, data, config: what is here   simulate     one, in virtual time
    bench, tune, export: one device                verify       N workers beside one
    partition    a model over n workers            processes    ps, clean: what was left behind
    doctor       what is wrong in a script         probe        what this machine takes
    watch        a run that is under way           flags        what verbs share

A verb is a line in the table of ``app.py`` and a function, or an app of several, in the file that
is named there, which is imported only when the verb is used.
"""
