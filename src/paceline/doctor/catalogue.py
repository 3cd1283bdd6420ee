"""All rules by name and by group; each rule is a file in its group's folder.

A new rule is a file in a group's folder and a line in the docstring of that folder's `__init__`.
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
"""The rules of each group, by the group's name."""
RULES: dict[str, ScriptRule] = {rule.name: rule for group in GROUPS.values() for rule in group}
"""Every rule by its name."""
