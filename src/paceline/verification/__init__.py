"""Whether N workers compute what one process does, on the user's own model; and if not, why.

    verify     the rows of the table: workers, number format, batches; what was found
    subjects   a task or a script, run small by one and by several
    plain      the loop without Paceline, and the order of its samples
    script     what runs in a worker in place of the script, and runs the script
    layers     which layers give a sample another output when its batch is shared

It must not know how an exchange or an engine carries anything.
"""
