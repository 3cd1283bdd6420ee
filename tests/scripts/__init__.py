"""Small training scripts of every kind that a PyTorch user writes, each beside its plain twin.

A family is a file; a script is a function of it, read by itself, with what must hold of it at the
family's end. ``python -m scripts`` in tests/ runs all of them everywhere and writes
docs/scripts.md.
"""

from . import (
    accumulation,
    chance,
    changes,
    checkpoints,
    control,
    evaluation,
    gradients,
    layers,
    losses,
    machinery,
    optimizers,
    samples,
    schedules,
    weights,
)
from .base import Script

FAMILIES: dict[str, tuple[Script, ...]] = {
    "Loops": control.SCRIPTS,
    "Data and order": samples.SCRIPTS,
    "Losses": losses.SCRIPTS,
    "Gradients": gradients.SCRIPTS,
    "Accumulation": accumulation.SCRIPTS,
    "Optimizers": optimizers.SCRIPTS,
    "Schedules": schedules.SCRIPTS,
    "Layers and buffers": layers.SCRIPTS,
    "Weights": weights.SCRIPTS,
    "Between epochs": changes.SCRIPTS,
    "Evaluation": evaluation.SCRIPTS,
    "Checkpoints": checkpoints.SCRIPTS,
    "Chance": chance.SCRIPTS,
    "Machinery": machinery.SCRIPTS,
}
SCRIPTS = tuple(script for family in FAMILIES.values() for script in family)


def find(name: str) -> Script:
    """The script of this name."""
    [script] = [one for one in SCRIPTS if one.name == name]
    return script
