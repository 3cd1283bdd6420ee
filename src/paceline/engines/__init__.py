"""Where members run: each engine makes time pass, carries facts in and orders out.

    base      the contract
    inline    the whole run in one process, for tests and debuggers
    local     processes on this machine, shared memory between them

They must not know protocols or plans.
"""
