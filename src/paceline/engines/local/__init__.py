"""The local engine: members are processes on this machine that share memory.

    engine        the contract, from the launcher's side; members as processes
    switchboard   the channels to all members at once
    forkserver    the process that members are forked from     client    the launcher's end of it
    preload       modules that are imported once, for all members
    process       a member from its fork to its end            stack     where a member hangs

It must not know protocols or plans.
"""
