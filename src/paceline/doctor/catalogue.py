"""All rules, by name; one file each, in folders by group.

A new rule is a file in a group's folder and a name in that folder's `__init__`.
"""

from . import evaluation, gradients, inputs, loop, model, precision, several, waits
from .rule import ScriptRule

GROUPS = {
    "loop": loop.RULES,
    "evaluation": evaluation.RULES,
    "gradients": gradients.RULES,
    "model": model.RULES,
    "inputs": inputs.RULES,
    "precision": precision.RULES,
    "waits": waits.RULES,
    "several": several.RULES,
}
"""Group -> its rules."""
RULES: dict[str, ScriptRule] = {one.name: one for group in GROUPS.values() for one in group}
"""Name -> rule."""
