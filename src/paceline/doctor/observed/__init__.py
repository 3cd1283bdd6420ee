"""A script's steps, observed in a process of its own, and what each fix is worth there.

    launching --begins--> child: the script --hooks, feed--> session --file--> Observation --> lines

    launching     begins the script, ends it, and says why there was nothing to observe
    child         the process: the script as ``__main__``
    session       what is done at its steps, one after the other
    hooks, feed   where a step ends, what its parts take; batches, timed, without end, by others
    clock         parts that exclude one another
    operations    what operations are bound by, from torch's profiler
    knob          a fix that can be turned on and off between two steps; knobs, ways: which
    record        losses and gradients, so that two versions of a script can be compared
    pairs         whether a fix is worth 2 %, from pairs of blocks
    patches       attributes that are exchanged for a while; whose line it is
    observation   what was found, as values; lines: shown

Nothing of the script is changed: it runs as it is, and its process is thrown away.
"""
