"""One sentence on why the user's code failed, with the user's file and line.

Compilers and tracers raise errors of many lines: the first says what is wrong, and a later one has
the file and line of the user's code. This module must not know what was tried.
"""

import importlib.util
import re
from pathlib import Path

_PLACE = re.compile(r'File "([^"]+)", line (\d+)')
_MOST = 240
"""Limit in characters for the compiler's message."""
_NO_WORDS = ("from user code", "traceback", "set torch", "hint", "developer debug", "====", "~~~")


def reason(error: BaseException) -> str:
    """Return the error in one line: its kind, its first words, and the user's file and line."""
    text = str(error)
    where = _place(text) or _place_of_frames(error)
    words = _words(text) or type(error).__name__
    kind = type(error).__name__
    message = words if kind in words else f"{kind}: {words}"
    return f"{message} ({where})" if where else message


def _words(text: str) -> str:
    """Return the first meaningful line, and the explanation if there is one."""
    lines = [line.strip() for line in text.splitlines()]
    messages = [
        line.rstrip(":")
        for line in lines
        if line and not _PLACE.search(line) and not line.lower().startswith(_NO_WORDS)
    ]
    if not messages:
        return ""
    wanted = messages[0]
    if wanted.startswith("Constraints violated"):
        constraint = next((line for line in lines if line.startswith("- ")), "")
        wanted = f"the batch cannot vary: {constraint[2:].split('. ')[0] or wanted}"
    if wanted.startswith("Could not guard on data-dependent expression"):
        wanted = f"a branch depends on the values of a tensor: {wanted.split('. ')[0]}"
    explanation = next((line for line in messages if line.startswith("Explanation")), "")
    wanted += f"; {explanation.removeprefix('Explanation: ')}" if explanation else ""
    return wanted if len(wanted) <= _MOST else f"{wanted[: _MOST - 3]}..."


def _place(text: str) -> str:
    """Return the last place in the text outside torch."""
    places = [match for match in _PLACE.findall(text) if not match[0].startswith(_torch())]
    return f"{places[-1][0]}:{places[-1][1]}" if places else ""


def _place_of_frames(error: BaseException) -> str:
    """Return the innermost executed line that is neither torch's nor ours."""
    here = str(Path(__file__).parent.parent)
    place = ""
    is_below_us = False
    frame = error.__traceback__
    while frame is not None:
        name = frame.tb_frame.f_code.co_filename
        is_below_us = is_below_us or name.startswith(here)
        if (
            is_below_us
            and not name.startswith((_torch(), here, "<"))
            and "site-packages" not in name
        ):
            place = f"{name}:{frame.tb_lineno}"
        frame = frame.tb_next
    return place


def _torch() -> str:
    """Return the folder of torch without importing it."""
    spec = importlib.util.find_spec("torch")
    return str(Path(spec.origin).parent) if spec is not None and spec.origin else "torch"
