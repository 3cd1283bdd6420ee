"""``Normalize`` comes before ``ToTensor``.

It needs a tensor but gets an image: "Input should be Tensor or PIL image", at the first sample.

Fix: ToTensor() first, then Normalize(...).
Source: torchvision.transforms.Normalize documentation: "this transform does not support PIL Image".
"""

import re
from collections.abc import Iterator

import libcst as cst

from ...porting.tree import positional
from ..facts import Facts
from ..findings import Severity
from ..rule import Found, ScriptRule

_OF_TORCHVISION = re.compile(r"^(torchvision\.)?transforms\.(v2\.)?Normalize$")
_TENSORS = ("ToTensor", "PILToTensor", "ToImage", "ToDtype", "ConvertImageDtype")


def check(facts: Facts) -> Iterator[Found]:
    for call in facts.script.every_call:
        if not facts.meaning(call).endswith("transforms.Compose") or not positional(call):
            continue
        steps_list = positional(call)[0]
        steps = (
            [element.value for element in steps_list.elements]
            if isinstance(steps_list, cst.List)
            else []
        )
        kinds = [facts.meaning(step).rpartition(".")[2] for step in steps]
        if "Normalize" not in kinds or "ToTensor" not in kinds:
            continue
        if not _OF_TORCHVISION.search(facts.meaning(steps[kinds.index("Normalize")])):
            continue  # the user's own class may well take images
        before = kinds[: kinds.index("Normalize")]
        is_known = all(isinstance(step, cst.Call) for step in steps) and "Lambda" not in before
        if is_known and not set(before) & set(_TENSORS):
            yield Found(steps[kinds.index("Normalize")], "Normalize gets an image, not a tensor")


_DATA = """
import torch
from torchvision import transforms
both = transforms.Compose([transforms.Resize(32), {}])
"""
RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=(_DATA.format("transforms.Normalize([0.5], [0.5]), transforms.ToTensor()"),),
    healthy=(
        _DATA.format("transforms.ToTensor(), transforms.Normalize([0.5], [0.5])"),
        _DATA.format("transforms.Normalize([0.5], [0.5])"),
        "from dataloaders import custom_transforms as tr\n" + _DATA.format("tr.Normalize(mean=m, std=s), tr.ToTensor()"),
    ),
)  # fmt: skip
