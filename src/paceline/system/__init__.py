"""What we ask of the operating system.

    files              a folder of ours, opened by what it is; no links
    streams            output that may go away; a log that is followed
    signals            who stops a run, softly first
    interpreter        what a script that runs inside this process changes of it
    limits             what this process may take
    control_groups     those that it is in, which may limit it
    processors         cores and accelerators that it may compute on
    ceilings           what this machine can do at most, as it was measured
    pages              memory that is given back to the machine
    reasons            why the user's code failed, in one sentence with its line
    vitals             what another process does

It must not know runs.
"""
