"""Why the user's code, or torch about it, failed: one sentence with the user's file and line.

Compilers and tracers answer with pages, whose first line says what is wrong; somewhere below stand
the file and the line of the user's code. This module must not know what was tried.
"""

import importlib.util
import re
from pathlib import Path

_PLACE = re.compile(r'File "([^"]+)", line (\d+)')
_MOST = 240
"""Characters of the compiler's own words."""
_NO_WORDS = ("from user code", "traceback", "set torch", "hint", "developer debug", "====", "~~~")


def reason(error: BaseException) -> str:
    """What was raised, in one line: the kind, the first words, and the user's file and line."""
    text = str(error)
    where = _place(text) or _place_of_frames(error)
    words = _words(text) or type(error).__name__
    kind = type(error).__name__
    said = words if kind in words else f"{kind}: {words}"
    return f"{said} ({where})" if where else said


def _words(text: str) -> str:
    """The first line that says something, and the next one where that is an explanation."""
    lines = [line.strip() for line in text.splitlines()]
    said = [
        line.rstrip(":")
        for line in lines
        if line and not _PLACE.search(line) and not line.lower().startswith(_NO_WORDS)
    ]
    if not said:
        return ""
    wanted = said[0]
    if wanted.startswith("Constraints violated"):
        found = next((line for line in lines if line.startswith("- ")), "")
        wanted = f"the batch cannot vary: {found[2:].split('. ')[0] or wanted}"
    if wanted.startswith("Could not guard on data-dependent expression"):
        wanted = f"a branch depends on the values of a tensor: {wanted.split('. ')[0]}"
    more = next((line for line in said if line.startswith("Explanation")), "")
    wanted += f"; {more.removeprefix('Explanation: ')}" if more else ""
    return wanted if len(wanted) <= _MOST else f"{wanted[: _MOST - 3]}..."


def _place(text: str) -> str:
    """The last place in the text that is not torch's own."""
    places = [match for match in _PLACE.findall(text) if not match[0].startswith(_torch())]
    return f"{places[-1][0]}:{places[-1][1]}" if places else ""


def _place_of_frames(error: BaseException) -> str:
    """The innermost line that ran and is neither torch's nor ours."""
    here = str(Path(__file__).parent.parent)
    found = ""
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
            found = f"{name}:{frame.tb_lineno}"
        frame = frame.tb_next
    return found


def _torch() -> str:
    """The folder of torch, which is not imported for it."""
    spec = importlib.util.find_spec("torch")
    return str(Path(spec.origin).parent) if spec is not None and spec.origin else "torch"
