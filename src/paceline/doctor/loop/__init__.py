"""The loop that trains, and what stands beside it."""

from ..rule import ScriptRule

RULES: tuple[ScriptRule, ...] = ()
