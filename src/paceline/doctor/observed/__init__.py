"""Observe a script's steps in a process of its own, and measure what each fix is worth there.

    launching --starts--> child: the script --hooks, feed--> session --file--> Observation --> lines

    launching     starts and ends the script, and explains why there was nothing to observe
    child         the process: runs the script as ``__main__``
    session       what happens at each of its steps, in order
    hooks, feed   the end of a step and the time of its parts; the batches of its loader
    clock         times parts that exclude one another
    operations    what bounds the operations, from torch's profiler
    knob          a fix that is turned on and off between steps; knobs, ways: the fixes there are
    record        losses and gradients, so that two versions of a script can be compared
    pairs         decides whether a fix is worth 2 %, from pairs of blocks
    patches       attributes that are replaced for a while; the user's line that made a call
    observation   the values that were measured; lines: printed

The script is not changed: it runs as it is, and its process is thrown away.
"""
