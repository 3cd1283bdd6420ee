"""The mode of a model's modules, which all of a copy's workers compute a pass in.

This module must not know parts.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from ..errors import ConfigError
from .meeting import mode_of


def module_mode(module: nn.Module) -> int:
    """One number for which modules are in training, see `mode_of`."""
    return mode_of(one.training for one in module.modules())


@contextmanager
def in_mode(module: nn.Module, mode: int) -> Iterator[None]:
    """Its modules in the mode that others are in, meanwhile.

    Raises:
        ConfigError: it is a mix, and here it is another one.
    """
    if (mine := module_mode(module)) == mode:
        yield
        return
    if mode > 1:
        raise ConfigError(
            "another worker calls the model with some modules in training and others not, and "
            "here they are others (model.train(), model.eval()): set them in all workers alike"
        )
    modules = list(module.modules())
    before = [one.training for one in modules]
    for one in modules:
        one.training = bool(mode)
    try:
        yield
    finally:
        for one, flag in zip(modules, before, strict=True):
            one.training = flag
    assert module_mode(module) == mine
