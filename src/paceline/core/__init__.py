"""What happens in a run and what follows from it: facts in, decisions out, nothing else.

    coordinator    hears every fact, asks the protocol, answers with orders
    ledger         which mini-batch is where; batches and cuts make them, prefetch keeps some
    membership     who is alive, what each member is doing, and what a protocol may decide
    jobs           which member executes which update, and in which order
    rest_state     a run without its members, as a checkpoint holds it
    stats          what a run counts while it goes, also in virtual time

Pure: no tensor, clock, thread or process.
"""
