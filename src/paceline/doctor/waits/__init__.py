"""What makes the host wait for the device, or copies where it need not."""

from ..rule import ScriptRule

RULES: tuple[ScriptRule, ...] = ()
