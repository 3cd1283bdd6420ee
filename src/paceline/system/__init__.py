"""Everything that touches the operating system.

    files              folders and files of ours, opened safely; no links
    streams            output that may go away; following a log
    signals            the signals that stop a run, gently first
    interpreter        state that a script running inside this process changes
    limits             memory and files that this process may use
    control_groups     the control groups of this process, which may limit it
    processors         cores and accelerators that it may use
    ceilings           measured limits of this machine
    pages              returning freed memory to the machine
    reasons            why the user's code failed, in one sentence with its line
    vitals             the state of another process

It must not know runs.
"""
