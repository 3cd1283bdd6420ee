"""Train one model that is spread over several workers: who holds which part, and what is sent.

    asked       what a script asks for, and which of its settings cannot be split
    group       the workers that hold one copy of the model, and those that hold the same part of it
    meeting     what each worker of a copy is about to do, announced before any of them does it
    cut         where the model is cut: measured by one worker, told to all, proved on an example
    borders     what crosses each border, for any number of rows, and which of it gets gradients
    own_code    whether the model's own code, which is not run, still says what it said
    batch_norm  running statistics of batch norm layers, for each worker's mini-batches
    modes       training or evaluation mode, the same in all workers of a copy
    chunks      micro-batches of all workers, and tensors of any number of rows
    pipeline    micro-batches through the parts, and their gradients back
    scheduled   forward and backward by 1f1b or interleaved, where the loss is known
    averaging   the optimizer's step, each worker on its part
    whole       the whole model again: state_dict, checkpoints
    base        the user's own module, computed by several workers: what all splits share
    model       a model in parts, one after the other
    trained     the same, where the loss is known
    layered     layers divided over channels
    columns     which layers are divided over channels, and how they compute
    shards      each parameter in pieces, gathered where it is needed
    units       which parameters are gathered at a time

**Every worker is a member of the run, as it is where nothing is split.** It has its own mini-batch
(a lease), runs the script's own loss line on it, and pushes; the coordinator, the protocol, the
ledger and evaluation know nothing of a split. Only the model is spread:

    worker 0   loader -> x0 ->[ model(x0) ]-> y0 -> loss(y0) .backward() -> step
                               |         |                    |
                               v         |                    v
                        [ part 0 ]    [ part 1 ]       gradients of part 0, of x0 and x1
                        on worker 0   on worker 1      gradients of part 1, of x0 and x1
                               ^         |                    ^
                               |         v                    |
    worker 1   loader -> x1 ->[ model(x1) ]-> y1 -> loss(y1) .backward() -> step

All workers of a copy compute ``model(x)`` together: inputs go to the first part, in micro-batches
(gpipe: Y. Huang et al., "GPipe", 2019), and outputs come back from the last part to the worker that
gave the inputs. ``backward()`` does the same in the other direction: each worker sends the
gradients of its loss, times its share of the samples, and each part adds them up over all workers.
So a part's ``.grad`` already is the mean that the optimizer steps with; with several copies (2x2)
it is summed over the workers that hold the same part. No batch is loaded twice, and no output is
sent where it is not needed.

Where layers are divided over channels (`layer`), all rows go to all workers. Each worker has its
columns of pairs of layers, and all other layers; the outputs of a pair's columns are summed over
the copy, and so are the gradients of their inputs:

    x0, x1 -> whole layers ->[ own outputs of one, own inputs of the next ]-> sum -> ... -> y0

**No worker can be left waiting.** A worker that reaches ``model(x)``, ``backward()`` or the end of
a step first announces it to all of its copy, and learns what the others have reached (meeting.py):

    all the same                    they do it
    some are at a step's end        these compute their parts for the others, and announce again: a
                                    short last batch, an evaluation that one finishes earlier
    some only look (no gradients)   all compute their parts for these first
    two are at ends of two kinds    refused: one would wait for what the other does not do
    anything else                   refused, naming who does what: it would be another computation

**A parameter that is elsewhere cannot be mistaken for a value.** A parameter of another worker's
part stays in the script's module, as the same object, without memory; code that reads its values is
told where they are (replica/absent.py). ``model.state_dict()``, ``pace.save`` and checkpoints are
the whole model's, at one version: a thread of each worker hands out its part on request (whole.py),
so one worker alone may ask. A checkpoint is what one device would have written, and any split can
resume from it.

*Rejected:* one member for a whole copy, which the copy's other workers follow (each batch would be
loaded by all of them or sent, each output sent to all, and every message to a member passed on to
several processes); for a script's own loop, schedules that call the loss themselves, in the last
part (a script's loss line comes after ``model(x)``). The loss of a task is known: scheduled.py.

This package must not know protocols, messages or how ranks find each other.
"""
