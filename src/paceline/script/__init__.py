"""What a script holds, and what becomes of its objects.

    worker      connect, prepare, epochs, step         prepared   what prepare makes of its objects
    participant                                        sum, evaluate, save: beside the steps
    trials                                             how workers enter and leave a trial
    source      where its mini-batches come from
    loader      the batches of its loop                loop       those that it has in hand
    second_loader                                      those of a further loader beside them
    step        one block, the step that pushes        holding    one batch, one block, one lease
    schedules, shared_schedule                         its schedulers; those that several step
    amp, grad_scaler                                   16 bits; the scaler of a run
    patches, unprepared                                what is replaced, and what is left out
    gradients, accumulation                            what is done to gradients, and to several
    closures                                           optimizers that call the model again
    evaluation, place, member_state                    beside the loop, and in checkpoints
    given                                              state dicts, which are copies

It must not know how anything is carried, nor where the members are.
"""
