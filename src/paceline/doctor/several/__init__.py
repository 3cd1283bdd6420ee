"""Several processes, devices, and the environment.

data_parallel                ``nn.DataParallel``: one process drives all devices
debugging_left_on            The environment is set for debugging
devices_named_too_late       ``CUDA_VISIBLE_DEVICES`` is set after a device was used
gloo_for_devices             Gradients of CUDA devices are exchanged with gloo
ranks_write_one_file         Every process writes the same file
same_data_everywhere         Each process of a data-parallel run reads all of the data
synchronized_each_backward   Accumulated gradients are averaged over the processes in each backward
                             pass
unused_parameters_sought     DistributedDataParallel searches for unused parameters in a model that
                             uses all of them
"""

from ..rule import rules_in

RULES = rules_in(__name__, __path__)
"""The rules of this group, in the order of their names."""
