"""A trace edited by a test, with correct checksums, so that only the edit is wrong."""

import re

from paceline.trace.records import seal

_END = re.compile(r', ?"sum": ?\d+\}$|\}$')


def reseal(text: str) -> str:
    """The same complete lines with new checksums in place of the old."""
    out, now = "", 0
    for line in text.splitlines():
        one, now = seal(_END.sub("", line), now)
        out += one
    return out
