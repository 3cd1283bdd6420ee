"""What this machine is, and why its accelerator cannot be used: ``paceline env``.

    source        files below a root, outputs of commands, the environment: a recorded machine is
                  read like a living one
       |
    processor     cores, threads, caches, vectors, NUMA nodes, memory and its channels
    storage       what kind of disk a folder lies on
    nvidia        what nvidia-smi says
    hardware      accelerators on the buses, whatever their drivers do; files of their drivers
    libraries     Python, torch as it was built and as it runs, CUDA, cuDNN, NCCL
       |
    inventory     all of that, as one value; its JSON
       |
    causes        PURE  why no accelerator can be used: one cause, one command, the nearest to the
    causes_nvidia       hardware first
       |
    lines         what is printed, and what a bug report needs

    ceilings      what `paceline probe` has measured here, for whoever plans with it

It must not know runs or settings.
"""
