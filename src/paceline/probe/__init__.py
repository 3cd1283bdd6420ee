"""What this machine takes, beside what the textbook says; and what a model makes of it.

    kernels.cpp            C++: loads that wait for each other, copies, multiply-adds, reads, bytes
    kernels                compiled here, with types
        |
    memory                 caches and memory: latency, banks, bursts, bandwidth
    rates                  vector units in registers, products of matrices through torch
    storage                the disk below a folder
    messages               between cores, over loopback, to a named host; processes and calls
    devices                an accelerator: launches, its memory, the way to it
        |
    figures                one measured thing, and the textbook's
    probing                all of them in turn -> the file of ceilings (machine/ceilings.py)
        |
    tables, picture        how they are shown

    roofline               each layer of a model below what the probe has found
    concurrency            one job as coroutines, threads and processes
    copies                 what moving a model's data well is worth; processor or device

The rest of Paceline reads the file of ceilings, and never this folder.
"""
