"""The tools that measure one device: a clock that knows queues, and what is built on it.

    clock                  Benchmark: a span of time, with all queued work in it
    samples                measured times: in turn, two things at once, as tables
    device, apart          what is measured on: its memory, and an object in its own process
    queues, asynchrony     queued operations as an accelerator's stream has them; what they save
    overlap                what copying meanwhile saves, and a second place
    collectives, collective_seat     sums between processes, beside what is predicted
    links                  what cores are connected by, and the rings in it
    scaling                what more workers bring: real runs by 1, 2, 4 ..., in turn
    splits                 every split of a model that runs, beside its prediction
    split_watch            what each worker's process holds, computes and writes meanwhile
    ways, compiling        the same model through each compiler
    batch_size, throughput           which batch fits; images a second, up to where memory ends
    training, batch_choice           real training: gradient noise, and what a batch size is worth
    lr_range, lr_worker, lr_script   loss against learning rate, by several workers; of a script
    exporting              a file, proved and measured

Each measurement has its question, its figures and how they print in one file.

Our own timing scripts lie in the top folder ``bench/``; these are the product's.
"""
