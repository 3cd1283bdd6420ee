"""One member's copy of the model.

    replica        parameters, buffers and gradients as flat memory
    absent         a parameter whose values are on another worker
    own_gradients  gradients that stay where torch makes them, and whether they were changed
    lent           gradient memory lent to the script as .grad, and whether it still holds it
    edits          changes of gradients between backward and push
    held           whether the model still uses that memory, unchanged by others
    held_state     the same for the state of its optimizers
    set_aside      gradients of several optimizers that are not pushed together
    clips          clips of the averaged gradient that the script has requested
    layers         leaving a step between two layers, and the plan's notes on layers
    rates          learning rates scaled by an update's samples, and warmed up
    seeding        random state as a function of the mini-batch

It must not know exchanges or protocols, nor how the store makes a version.
"""
