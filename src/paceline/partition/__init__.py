"""Divide a model over several workers: where to cut it, what each split costs, which one to advise.

    graph          what is split: nodes of work, edges of bytes, tied parameters
    pipeline       what a cut is for: workers, the link between two of them, micro-batches
    names          the names that --split accepts
    placement      a cut: each part's time and memory, the traffic over its borders; the even cut
    search         the best cut; brute_force: the best cut of a small model, by trying every one
    cuts           the cut that a run uses, and its number of micro-batches
    schedules      who computes which micro-batch when: gpipe, 1f1b, interleaved; in virtual time
    prices         all ways to split in one table, and the advised one; costs: the inputs of prices
    memory         how many bytes a worker holds for parameters, by name

                      splits/ measures a module                      splits/ makes parts of a module
                                |                                                ^
    WorkGraph + Pipeline -> find_placement -> Placement -> schedule -> a step -> |
        |                                                    in virtual time     v
        +--------> prices: none  data  network  layer  shard  AxB  -> table -> advised

**The borders.** A part is what lies between two borders. A border is a set of nodes that contains
everything its nodes need. Parts form a row: whatever crosses a border goes to the next part,
which passes on what it does not use itself. So no part depends on a later one, and the cost of a
part follows from its two borders alone:

    inputs -> [ a  b  c ] -> [ d  e ] -> [ f ] -> outputs        f reads a's output, too: it crosses
               part 0   |    part 1 |    part 2                  both borders, through part 1
                     border 0    border 1

**The price.** For one micro-batch, part p computes for w_p seconds and receives and sends for t_p
seconds, all on its own worker. M micro-batches through all parts take

    step = sum of (w_p + t_p) + (M - 1) max of (w_p + t_p)

(the first micro-batch fills the pipeline; the slowest part then paces all others). This is exact
for gpipe where the same part is the slowest forward and backward. Cuts are compared by it; the
schedule of the chosen cut is then run in virtual time.

Sources are cited where they are used. This package is pure: no tensors, processes or clocks. It
must not know how costs were measured, nor what a part is made of.
"""
