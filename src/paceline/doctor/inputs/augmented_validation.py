"""A model is evaluated on randomly augmented images.

The score is measured on different images each time, and is lower than on the images themselves.

Fix: a separate transform for evaluation: Resize, CenterCrop, ToTensor, Normalize.
Source: PyTorch, Transfer Learning for Computer Vision Tutorial: "just normalization for validation".
"""

import re
from collections.abc import Iterator

import libcst as cst

from ...porting.tree import by_name, positional
from ..facts import Facts
from ..findings import Severity
from ..rule import Found, ScriptRule
from ..values import literal

_RANDOM = re.compile(
    r"(^|\.)(Random(?!Apply$|Choice$|Order$)\w+|ColorJitter|AutoAugment|RandAugment|TrivialAugmentWide|"
    r"AugMix|GaussianBlur|ElasticTransform)$"
)
_PICTURES = re.compile(r"(^|\.)datasets\.\w+$")
_HELD_OUT = re.compile(r"(^|[/_\\.\-])(val|valid|validation|test|testing|eval)([/_\\.\-]|$)", re.I)


def check(facts: Facts) -> Iterator[Found]:
    for call in facts.script.every_call:
        if not _PICTURES.search(facts.meaning(call)) or not _is_held_out(facts, call):
            continue
        transform = by_name(call).get("transform") or _transform(facts, call)
        names = _random_in(facts, transform) if transform is not None else []
        if names:
            yield Found(call, f"evaluation data go through {', '.join(names)}")


def _is_held_out(facts: Facts, call: cst.Call) -> bool:
    """Whether a data set is for evaluation: train=False, split="val", a folder called val."""
    keywords = by_name(call)
    if facts.meaning(call).endswith(("ImageFolder", "DatasetFolder")):
        root = facts.argument(call, "root", 0)
        strings = [
            node.evaluated_value for node in facts.script.within(root)
            if isinstance(node, cst.SimpleString)
        ] if root is not None else []  # fmt: skip
        last = strings[-1] if strings else None
        return isinstance(last, str) and _HELD_OUT.search(last) is not None
    is_off = literal(keywords.get("train")) == "False"
    return is_off or (literal(keywords.get("split")) or "") in ("val", "valid", "test")


def _transform(facts: Facts, call: cst.Call) -> cst.BaseExpression | None:
    """Return the second argument of an ImageFolder, or None."""
    arguments = positional(call)
    is_folder = facts.meaning(call).endswith("ImageFolder")
    return arguments[1] if is_folder and len(arguments) > 1 else None


def _random_in(facts: Facts, transform: cst.BaseExpression) -> list[str]:
    """Return the names of a Compose's random transforms; none if it may be one of several."""
    origins = [transform] if isinstance(transform, cst.Call) else facts.flow.origins(transform)
    if len(origins) != 1 or not facts.meaning(origins[0]).endswith("Compose"):
        return []
    return [
        facts.meaning(node).rpartition(".")[2] for node in facts.script.within(origins[0])
        if isinstance(node, cst.Call) and _RANDOM.search(facts.meaning(node))
        and "transforms" in facts.meaning(node)
    ]  # fmt: skip


_DATA = """
import torch
from torchvision import datasets, transforms
first = transforms.Compose([transforms.RandomCrop(32, padding=4), transforms.ToTensor()])
second = transforms.Compose([transforms.CenterCrop(32), transforms.ToTensor()])
train = datasets.CIFAR10("data", train=True, transform=first)
test = datasets.CIFAR10("data", train=False, transform={})
folder = datasets.ImageFolder("pictures/val", {})
"""
RULE = ScriptRule.of(
    __name__, __doc__, Severity.BUG, check,
    sick=(_DATA.format("first", "second"), _DATA.format("second", "first")),
    healthy=(_DATA.format("second", "second"), _DATA.format("second", "first").replace("pictures/val", "values/train")),
)  # fmt: skip
