"""The decisions of a run: facts in, orders out, nothing else.

    coordinator    handles every fact, asks the protocol, returns orders
    ledger         where each mini-batch is; batches and cuts make them, prefetch reserves some
    membership     the live members, their state, and the decisions a protocol may make
    jobs           which member executes which update, and in which order
    rest_state     a run without its members, as a checkpoint holds it
    stats          counters of a run, live or in virtual time

Pure: no tensor, clock, thread or process.
"""
