"""A device is named ``gpu``.

torch has no such device and raises a RuntimeError.

Fix: write "cuda" (or "mps", "xpu").
Source: torch.device documentation.
"""

import re
from collections.abc import Iterator

import libcst as cst

from ...porting.tree import by_name, positional
from ..facts import Facts
from ..findings import Severity
from ..rule import Found, ScriptRule
from ..values import literal


def check(facts: Facts) -> Iterator[Found]:
    for call in facts.script.every_call:
        is_device = facts.method(call) == "to" or facts.meaning(call) == "torch.device"
        arguments = positional(call)[:1] if is_device else []
        if "torch" in facts.meaning(call) or is_device:
            arguments += [value for name, value in by_name(call).items() if name == "device"]
        for argument in arguments:
            device = literal(argument) if isinstance(argument, cst.SimpleString) else None
            if device is not None and re.fullmatch(r"gpu(:\d+)?", device):
                yield Found(call, f"{facts.code(call)}: there is no device {device!r}",
                            f'write "{device.replace("gpu", "cuda")}"')  # fmt: skip


RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=('import torch\nt = torch.randn(100, 100).to("gpu", non_blocking=True)\n',),
    healthy=('import torch\nt = torch.randn(100, 100).to("cuda", non_blocking=True)\n',),
)  # fmt: skip
