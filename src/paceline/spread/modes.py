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
def modes_kept(module: nn.Module) -> Iterator[None]:
    """Afterwards every module is in its own mode again."""
    before = [(one, one.training) for one in module.modules()]
    try:
        yield
    finally:
        for one, is_training in before:
            one.training = is_training


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
    with modes_kept(module):
        for one in module.modules():
            one.training = bool(mode)
        yield
    assert module_mode(module) == mine


def refuse_batch_norm(module: nn.Module, *, is_frozen: bool = True) -> None:
    """Raise ConfigError where batch norm is in training, with its names.

    Args:
        is_frozen: what is in evaluation stays so; else ``module.train()`` is yet to come.
    """
    names = [
        name
        for name, one in module.named_modules()
        if isinstance(one, nn.modules.batchnorm._BatchNorm) and (one.training or not is_frozen)
    ]
    if names:
        raise ConfigError(
            f"{', '.join(names[:3])}: batch norm looks at the whole batch, and of micro-batches it "
            "would be another model; use nn.GroupNorm, freeze it by .eval() before prepare() and "
            "after each model.train(), or use --split data"
        )
