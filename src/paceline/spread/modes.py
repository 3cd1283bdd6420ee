"""Read and set the training mode of modules, in which all workers of a copy compute a pass.

This module must not know parts.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from ..errors import ConfigError
from .meeting import mode_of


def module_mode(module: nn.Module) -> int:
    """Return a number for which of a model's modules are in training, see `mode_of`."""
    return mode_of(layer.training for layer in module.modules())


@contextmanager
def modes_kept(module: nn.Module) -> Iterator[None]:
    """Restore the mode of every module on exit."""
    before = [(layer, layer.training) for layer in module.modules()]
    try:
        yield
    finally:
        for layer, is_training in before:
            layer.training = is_training


@contextmanager
def in_mode(module: nn.Module, mode: int) -> Iterator[None]:
    """Put all modules into the mode that other workers are in, and back on exit.

    Raises:
        ConfigError: the mode is a mix, and this worker's is a different one.
    """
    if (own_mode := module_mode(module)) == mode:
        yield
        return
    if mode > 1:
        raise ConfigError(
            "the modules that are in training mode differ from those of another worker "
            "(model.train(), model.eval()): set the same modes in all workers"
        )
    with modes_kept(module):
        for layer in module.modules():
            layer.training = bool(mode)
        yield
    assert module_mode(module) == own_mode
