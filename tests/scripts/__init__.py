"""Small training scripts of every kind that a PyTorch user writes, each beside its plain twin.

A family is a file; a script is a function of it, read by itself, with what must hold of it at the
family's end. ``python -m scripts`` in tests/ runs all of them everywhere and writes
docs/scripts.md.
"""

from . import (
    accumulation,
    checkpoints,
    control,
    evaluation,
    gradients,
    layers,
    losses,
    optimizers,
    schedules,
)
from .base import Script

FAMILIES: dict[str, tuple[Script, ...]] = {
    "Loops": control.SCRIPTS,
    "Losses": losses.SCRIPTS,
    "Layers and buffers": layers.SCRIPTS,
    "Schedules": schedules.SCRIPTS,
    "Gradients": gradients.SCRIPTS,
    "Accumulation": accumulation.SCRIPTS,
    "Optimizers": optimizers.SCRIPTS,
    "Evaluation": evaluation.SCRIPTS,
    "Checkpoints": checkpoints.SCRIPTS,
}
SCRIPTS = tuple(script for family in FAMILIES.values() for script in family)


def find(name: str) -> Script:
    """The script of this name."""
    [script] = [one for one in SCRIPTS if one.name == name]
    return script
