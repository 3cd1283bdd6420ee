"""Small training scripts of every kind that PyTorch users write, each with its plain twin.

Each file is a family and each script a self-contained function, with its requirements at the end
of the file. ``python -m scripts`` in tests/ runs all of them everywhere and writes
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
    """Find the script of this name."""
    [script] = [one for one in SCRIPTS if one.name == name]
    return script
