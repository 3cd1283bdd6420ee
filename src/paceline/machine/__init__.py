"""What this machine is, and why its accelerator cannot be used: ``paceline env``.

    source        files below a root, outputs of commands, the environment: a recorded machine is
                  read like a live one
       |
    processor     cores, threads, caches, vectors, NUMA nodes, memory and its channels
    storage       what kind of disk a folder lies on
    nvidia        the output of nvidia-smi
    hardware      accelerators on the buses, with or without a driver; the drivers' files
    libraries     Python, torch (its build and its state here), CUDA, cuDNN, NCCL
       |
    inventory     all of these as one value; its JSON
       |
    causes        PURE  why no accelerator can be used: one cause, one command; causes closest to
    causes_nvidia       the hardware first
       |
    lines         the printed report

    ceilings      the results of `paceline probe`, for the parts that plan with them

It must not know runs or settings.
"""
