"""One member's copy of the model.

    replica      parameters, buffers and gradients as flat memory
    held, marks  whether the model still holds that memory, and nobody else changed it
    seeding      random state as a function of what is computed
    device       which accelerator is a member's
    cancel       leaving a step between two layers
    batch_norm   what layers see of a batch that several share

It must not know sessions, the store or protocols.
"""
