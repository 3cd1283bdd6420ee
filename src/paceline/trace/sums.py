"""The sum that ends each line of a trace: CRC-32 of all lines up to there.

    {"kind":"note","t":0.1,"text":"hello"   ,"sum":2774135281}
    |--------------- body --------------|

It goes over the bodies of this line and of all before it, so that a line that was changed, lost,
added or moved is found, whatever it still says. It is against accidents, not against attackers.
This module must not know what the lines mean.
"""

import re
import zlib
from collections.abc import Iterator
from functools import partial
from typing import BinaryIO

LONGEST_BYTES = 1 << 26
"""Of a line: a grant of a million leases takes less."""
_MARK = ',"sum":'
_END = re.compile(r', ?"sum": ?\d+\}$|\}$')


def seal(body: str, before: int) -> tuple[str, int]:
    """A line as it is written, and its sum.

    Args:
        body: a JSON object without its closing brace.
        before: the sum of the line before; 0: there is none.
    """
    now = zlib.crc32(body.encode(), before)
    return f"{body}{_MARK}{now}}}\n", now


def opened(line: bytes, before: int) -> tuple[bytes, int]:
    """The body of a line, and its sum. ValueError where that is not the one it should have."""
    body, mark, end = line.rpartition(_MARK.encode())
    now = zlib.crc32(body, before)
    if not mark or end != b"%d}\n" % now:
        raise ValueError("its sum is another: this line, or one before it, is not what was written")
    return body, now


def lines_of(file: BinaryIO) -> Iterator[bytes]:
    """The lines of a trace; one that is longer than any is cut."""
    return iter(partial(file.readline, LONGEST_BYTES), b"")


def sound_part(file: BinaryIO, num_bytes: int) -> tuple[int, int]:
    """How many of the first bytes are lines as they were written, and the last one's sum."""
    found, now = 0, 0
    for line in lines_of(file):
        try:
            _, following = opened(line, now)
        except ValueError:
            break
        if found + len(line) > num_bytes:
            break
        found, now = found + len(line), following
    return found, now


def reseal(text: str) -> str:
    """A trace that was edited, with sums that are right: for tests, and for who knows why.

    Args:
        text: whole lines; sums that stand there already are replaced.
    """
    out, now = "", 0
    for line in text.splitlines():
        one, now = seal(_END.sub("", line), now)
        out += one
    return out
