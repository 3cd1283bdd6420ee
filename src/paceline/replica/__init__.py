"""One member's copy of the model.

    replica      parameters, buffers and gradients as flat memory
    absent       a parameter whose numbers another worker holds
    own_gradients  gradients where torch makes them, and whether they were changed
    lent         places of gradients that are .grad, and whether a script holds one still
    held         whether the model still holds that memory, and nobody else changed it
    held_state   the same of the state of its optimizers
    set_aside    gradients of several optimizers that are not pushed together
    clips        what the averaged gradient is to be clipped to
    layers       leaving a step between two of them, and what the plan says of them
    rates        learning rates scaled by an update's samples, and warmed up
    seeding      random state as a function of what is computed

It must not know exchanges or protocols, nor how the store makes a version.
"""
