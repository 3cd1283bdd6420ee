"""One model over several workers while it trains: who holds what, and what flows between them.

    asked       what a script asks for, and what of it cannot be split
    group       those who hold one copy of the model, and those who hold the same part of it
    meeting     what each of a copy's workers is about to do, before any of them does it
    cut         where the model is cut: measured by one, said to all, proved on an example
    borders     what crosses each border, for any number of rows, and which of it gets gradients
    own_code    what the model's own code, which is not run, goes by: whether it is as it was
    modes       in training or in evaluation, as all of a copy's workers are
    chunks      micro-batches of all workers, and tensors of any number of rows
    pipeline    micro-batches through the parts, and their gradients back
    scheduled   there and back by 1f1b or interleaved, where the loss is known
    averaging   the optimizer's step, each worker on its part
    whole       the model as one again: state_dict, checkpoints
    base        the user's own module, computed by several: what all ways share
    model       in parts, behind one another
    trained     likewise, where the loss is known
    layered     layers divided over channels: all rows through each worker's columns
    columns     which layers are, and how they compute
    shards      each parameter in pieces, put together where it is needed
    units       which parameters are put together at a time

**Every worker is a member, as it is where nothing is split.** It has a mini-batch of its own (a
lease), the script's own loss line on it, and its push; the coordinator, the protocol, the ledger
and evaluation know nothing of a split. What is spread is the model alone:

    worker 0   loader -> x0 ->[ model(x0) ]-> y0 -> loss(y0) .backward() -> step
                               |         |                    |
                               v         |                    v
                        [ part 0 ]    [ part 1 ]       gradients of part 0, of x0 and x1
                        on worker 0   on worker 1      gradients of part 1, of x0 and x1
                               ^         |                    ^
                               |         v                    |
    worker 1   loader -> x1 ->[ model(x1) ]-> y1 -> loss(y1) .backward() -> step

``model(x)`` is what all workers of a copy do together: inputs go to the first part, in
micro-batches (gpipe: Y. Huang et al., "GPipe", 2019), outputs come back from the last part to whose
they are. ``backward()`` is the same in the other direction: each sends what its loss gives, times
its share of the samples, and each part adds up over all of them. So what lies in ``.grad`` of a
part is already the mean that the optimizer steps on; with several copies (2x2) it is summed over
those who hold the same part. No batch is loaded twice, and no output is where it is not needed.

Where layers are divided over channels (`layer`), all rows go to all workers, each of which has its
columns of pairs of layers, and all other layers; what the columns of a pair give is summed over the
copy, and so are the gradients of what they take:

    x0, x1 -> whole layers ->[ own outputs of one, own inputs of the next ]-> sum -> ... -> y0

**Nobody can be left waiting.** Whoever comes to ``model(x)``, ``backward()`` or the end of a step
first says so to all of its copy, and hears what they come to (meeting.py):

    all the same                    they do it
    some are at a step's end        these compute their parts for the others, and say it again: a
                                    short last batch, an evaluation that one finishes earlier
    some only look (no gradients)   all compute their parts for these first
    two are at ends of two kinds    refused: one waits for what the other does not do
    anything else                   refused, with who does what: it would be another computation

**What is elsewhere cannot be taken for something.** A parameter of another worker's part stays in
the script's module, as itself, without memory; whatever looks at its numbers is told where they are
(replica/absent.py). ``model.state_dict()``, ``pace.save`` and checkpoints are the whole model's, at
one version: a thread of each worker hands out its part to whoever asks (whole.py), so one worker
alone may ask. A checkpoint is what one device would have written, and any split goes on from it.

*Rejected:* one member for a whole copy, whose other workers follow it (each batch would be loaded
by all of them or sent, each output sent to all, and every message to a member told to several
processes); for a script's own loop schedules that call the loss themselves, in the last part (a
script's loss line stands behind ``model(x)``). A task's loss is known: scheduled.py.

This room must not know protocols, messages or how ranks find each other.
"""
