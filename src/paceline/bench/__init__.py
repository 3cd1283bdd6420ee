"""Measurements on one machine: a clock that waits for queued work, and what is built on it.

    clock                  Benchmark: the time of a block, including the work that it queued
    samples                repeated times: in turns, two pieces of work at once, as tables
    device, apart          the device and its memory; an object in a process of its own
    queues, asynchrony     queued operations, as on an accelerator's stream; the time they save
    overlap                copying during computation, and work at two places
    collectives, collective_seat     collectives between processes, beside the predicted times
    links                  latency and bandwidth between cores, and the best rings
    scaling                real runs of 1, 2, 4 ... workers, in turns
    splits                 every split of a task that can run here, beside its prediction
    split_watch            memory, CPU time and bytes written of each worker's process
    ways, compiling        the same model through each compiler
    batch_size, throughput           the largest batch that fits; images a second
    training, batch_choice           real training: gradient noise, and a comparison of batch sizes
    lr_range, lr_worker, lr_script   loss over the learning rate, of a task or a script
    exporting              an exported file, checked and measured

Each measurement has its question, its figures and its printing in one file.

Paceline's own timing scripts are in the top folder ``bench/``; these measure for the user.
"""
