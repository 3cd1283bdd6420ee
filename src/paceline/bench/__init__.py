"""The tools that measure one device: a clock that knows queues, and what is built on it.

    clock.py       Benchmark: a span of time, with all queued work in it
    waiting.py     which devices and queues have work, and waiting for them
    workqueue.py   a queue of operations on a CPU, as an accelerator's stream is one
    samples.py     several measured times, and contenders that take turns

(Our own timing scripts lie in the top folder ``bench/``; this room is the product's.)
"""
