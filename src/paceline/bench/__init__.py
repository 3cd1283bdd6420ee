"""The tools that measure one device: a clock that knows queues, and what is built on it.

    clock         Benchmark: a span of time, with all queued work in it
    waiting, where                 devices: what has work; which one is meant, what it held
    workqueue, backends            a queue of operations, as an accelerator's stream is one
    samples, together, apart       measured times, two pieces at once, an object in its own process
    asynchrony, overlap            what queueing, and copying meanwhile, saves
    compiling, contender           the same model through each compiler
    throughput, stepping           images a second, up to where memory ends
    batch_size, batch_choice, noise, to_accuracy   which batch fits, and what one is worth
    exporting                      a file, proved and measured
    lines, asynchrony_lines, compiling_lines, throughput_lines   what is printed

Our own timing scripts lie in the top folder ``bench/``; these are the product's.
"""
