"""What a cause is, so that each maker's can stand in a file of its own."""

from typing import NamedTuple


class Defect(NamedTuple):
    """Why no accelerator can be used.

    Attributes:
        name: short, for programs; it stays.
        sentence: what is wrong.
        command: one, that mends it, or the first step.
    """

    name: str
    sentence: str
    command: str
