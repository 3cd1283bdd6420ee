"""The command line: one file a verb, each of which parses, calls and prints.

A verb is a line in the table of ``app.py`` and a file with ``register(app)``, which is imported
only when the verb is used.
"""
