"""One member's copy of the model.

    replica      parameters, buffers and gradients as flat memory
    held         whether the model still holds that memory, and nobody else changed it
    layers       leaving a step between two of them, and what the plan says of them
    seeding      random state as a function of what is computed

It must not know exchanges, the store or protocols.
"""
