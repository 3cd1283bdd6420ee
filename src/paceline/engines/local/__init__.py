"""The local engine: processes on this machine, shared memory between them.

    engine        the contract, from the launcher's side; members as processes
    switchboard   the channels to all members at once
    forkserver    the process that members are forked from     client    the launcher's end of it
    preload       modules that are imported once, for all members
    process       a member from its fork to its end            stack     where it is while it hangs

It must not know protocols or plans.
"""
