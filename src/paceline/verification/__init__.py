"""Whether N workers compute what one process does, on the user's own model; and if not, why.

    verify               the cases, one after the other; what is to blame for a difference
    verdict              the table of them
    cases                a case, and how a program is run small
    of_task, of_script   what is run
    in_worker            what a worker runs in place of a script, and which runs that script
    ending               a script that is run for its updates alone
    plain                the loop without Paceline, and the order of its samples
    layers               which layers give a sample another output when its batch is shared

It must not know how an exchange or an engine carries anything.
"""
