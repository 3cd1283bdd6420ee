"""Lets an optimizer save and load its state as if nothing had been chosen.

    state_dict()       chosen kernel, channels last     -> the script's kernel and memory order
    load_state_dict()  the file's kernel, memory order  -> chosen kernel, order of the parameters

A file of a tuned run then loads in plain code and in a run that chose otherwise, and the reverse.
Hooks of torch do it, so that it holds wherever the script saves. If an optimizer is prepared again,
what the first hooks know is the script's, so they have the last word on what is saved. This module
must not know why anything was chosen.
"""

from collections.abc import Callable, Mapping
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..store.joint import parameters_of
from ..store.optimizer_copy import order_as_parameters

_KERNELS = ("fused", "foreach")


class KeptKernel:
    """Sets an optimizer's kernel, and saves the one that the script chose.

    Args:
        kernel: ``fused`` or ``foreach``.
    """

    def __init__(self, optimizer: Optimizer, kernel: str) -> None:
        self._chosen = {name: name == kernel for name in _KERNELS}
        self._default = _kernel_of(optimizer.defaults)
        optimizer.defaults.update(self._chosen)  # for groups that the script adds
        self._set(optimizer)
        optimizer.register_load_state_dict_post_hook(self._set)
        optimizer.register_state_dict_post_hook(self._save, prepend=True)

    def _set(self, optimizer: Optimizer) -> None:
        """Set the chosen kernel; what the groups have now is the script's."""
        self._own = [_kernel_of(group) for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group.update(self._chosen)
        if self._chosen["fused"]:
            order_as_parameters(optimizer)
            for parameter in parameters_of(optimizer):
                step = optimizer.state.get(parameter, {}).get("step")
                if isinstance(step, Tensor):  # this kernel reads it on the device
                    optimizer.state[parameter]["step"] = step.to(parameter.device, torch.float32)

    def _save(self, optimizer: Optimizer, saved: dict[str, Any]) -> None:
        groups = saved["param_groups"]
        for group, own in zip_longest(groups, self._own, fillvalue=self._default):
            for name in _KERNELS:
                group.pop(name, None)
            group.update(own)
            if not (group.get("fused") or group.get("capturable")):
                _change(saved, group["params"], _step_on_host)


def _kernel_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: group[name] for name in _KERNELS if name in group}


def _step_on_host(number: int, key: str, value: Any) -> Any:
    return value.cpu() if key == "step" and isinstance(value, Tensor) else value


class KeptOrder:
    """Keeps an optimizer's state in the order of its parameters, and saves it in the script's.

    Args:
        strides: of the parameters, as the script made them.
    """

    def __init__(
        self, optimizer: Optimizer, strides: Mapping[nn.Parameter, tuple[int, ...]]
    ) -> None:
        self._strides = strides
        order_as_parameters(optimizer)
        optimizer.register_load_state_dict_post_hook(order_as_parameters)
        optimizer.register_state_dict_post_hook(self._save, prepend=True)

    def _save(self, optimizer: Optimizer, saved: dict[str, Any]) -> None:
        parameters = parameters_of(optimizer)

        def in_own_order(number: int, key: str, value: Any) -> Any:
            parameter = parameters[number]
            own = self._strides.get(parameter)
            if not isinstance(value, Tensor) or value.shape != parameter.shape or own is None:
                return value
            if value.stride() == own:
                return value
            return value.new_empty_strided(value.shape, own).copy_(value)

        _change(saved, range(len(parameters)), in_own_order)


def _change(saved: dict[str, Any], numbers: Any, change: Callable[[int, str, Any], Any]) -> None:
    """Replace entries of the saved state of these parameters; the optimizer keeps its own."""
    state = saved["state"]
    for number in numbers:
        if number in state:
            entries = state[number].items()
            state[number] = {key: change(number, key, value) for key, value in entries}
