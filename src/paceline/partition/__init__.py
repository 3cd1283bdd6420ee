"""A model over several workers: where to cut it, what each way to split costs, and whether to.

    graph          what is split: nodes of work, edges of bytes, tied parameters
    pipeline       what it is cut for: workers, the link between two, micro-batches
    names          what --split is told
    placement      a cut: what each part takes and holds, what flows over its borders; the even one
    search         the best cut; brute_force: of a small model, by trying every one
    cuts           the cut that is chosen, and its number of micro-batches
    schedules      who computes which micro-batch when: gpipe, 1f1b, interleaved; in virtual time
    prices         all ways to split in one table, and the advised one; costs: what from
    memory         what a worker holds of parameters, by name

                      splits/ measures a module                      splits/ makes parts of a module
                                |                                                ^
    WorkGraph + Pipeline -> find_placement -> Placement -> schedule -> a step -> |
        |                                                    in virtual time     v
        +--------> prices: none  data  network  layer  shard  AxB  -> table -> advised

**The borders.** A part is what lies between two borders, and a border is a set of nodes that holds
all that its nodes need. Parts stand in a row: what crosses a border goes to the next part, which
hands on what it does not use itself. So no part needs one that needs it, and what a part costs
follows from its two borders alone:

    inputs -> [ a  b  c ] -> [ d  e ] -> [ f ] -> outputs        f reads a's output, too: it crosses
               part 0   |    part 1 |    part 2                  both borders, through part 1
                     border 0    border 1

**The price.** Part p takes w_p of computing for a micro-batch and t_p to receive and to send, on
its own worker. M micro-batches through all parts take

    step = sum of (w_p + t_p) + (M - 1) max of (w_p + t_p)

(one micro-batch fills the pipeline; the slowest part hands out all others): gpipe just that, where
one part is the slowest both ways. A cut is chosen by it; what a schedule then makes of that cut is
run in virtual time.

Sources are named where each is used. This room is pure: no tensors, processes or clocks. It must
not know how costs were measured, nor what a part is made of.
"""
