"""One run from its settings to its summary: the folder it takes, its lives, its end."""
