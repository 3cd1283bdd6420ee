"""Measurements of this machine beside textbook figures, and a model against those ceilings.

    kernels.cpp            C++: loads that wait for each other, copies, multiply-adds, reads, bytes
    kernels                compiles it and wraps it with types
        |
    memory                 caches and memory: latency, banks, bursts, bandwidth
    rates                  vector units in registers, products of matrices through torch
    storage                the disk below a folder
    messages               between cores, over loopback, to a named host; processes and calls
    devices                an accelerator: launches, its memory, transfers
        |
    figures                one measured value and the textbook's
    probing                runs them all -> the file of ceilings (machine/ceilings.py)
        |
    tables, picture        output

    roofline               each layer of a model against the probe's ceilings
    concurrency            one job as coroutines, threads and processes
    copies                 gains from pinned memory, non_blocking, channels last; CPU or device

The rest of Paceline reads the file of ceilings and never this folder.
"""
