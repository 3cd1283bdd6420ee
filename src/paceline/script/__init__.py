"""What a script holds, and what becomes of its objects.

    worker      connect, prepare, epochs, step         loader     the batches of its loop
    prepared    the step that pushes                   holding    one batch, one block, one lease
    schedule, schedules, shared_schedule               its schedulers
    amp, grad_scaler                                   16 bits
    patches, unprepared                                what is replaced, and what is left out
    clipping, edits                                    what is done to gradients
    evaluation, place, member_state                    beside the loop, and in checkpoints

It must not know how anything is carried, nor where the members are.
"""
