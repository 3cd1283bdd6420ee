"""The command line: one file a verb, each of which parses, calls and prints.

    train, launch, running           a run            report, replay, data, config   what is there
    simulate, compare, plan          a prediction     bench, tune, export            one device
    flags, words, output             what all verbs share

A verb is a line in the table of ``app.py`` and a file with ``register(app)``, which is imported
only when the verb is used.
"""
