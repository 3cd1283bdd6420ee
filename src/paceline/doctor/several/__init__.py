"""Several processes, devices, and the environment."""

from ..rule import ScriptRule

RULES: tuple[ScriptRule, ...] = ()
