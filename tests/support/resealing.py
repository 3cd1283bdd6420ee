"""A trace that a test has edited, with sums that are right: what is wrong with it is the edit."""

import re

from paceline.trace.records import seal

_END = re.compile(r', ?"sum": ?\d+\}$|\}$')


def reseal(text: str) -> str:
    """The same whole lines; sums that stand there already are replaced."""
    out, now = "", 0
    for line in text.splitlines():
        one, now = seal(_END.sub("", line), now)
        out += one
    return out
