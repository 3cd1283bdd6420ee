"""Whether N workers compute what one process does, on the user's own model; and if not, why.

    verify               the cases in turn; the causes of a difference
    verdict              the table of the results
    cases                a case, and how a program is run small
    of_task, of_script   the programs that are run
    in_worker            runs the script in a worker
    ending               runs a script only for its updates
    plain                the loop without Paceline, and the order of its samples
    layers               layers that give a sample another output when its batch is shared

It must not know how an exchange or an engine carries anything.
"""
