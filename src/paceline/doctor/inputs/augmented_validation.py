"""A model is evaluated on pictures that are changed at random.

The score is of other pictures each time, and lower than that of the pictures themselves.

Fix: a transform of its own for evaluation: Resize, CenterCrop, ToTensor, Normalize.
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
        given = by_name(call).get("transform") or _transform(facts, call)
        names = _random_in(facts, given) if given is not None else []
        if names:
            yield Found(call, f"evaluation data go through {', '.join(names)}")


def _is_held_out(facts: Facts, call: cst.Call) -> bool:
    """Whether the arguments say so: train=False, split="val", a folder called val."""
    words = by_name(call)
    if facts.meaning(call).endswith(("ImageFolder", "DatasetFolder")):
        root = facts.argument(call, "root", 0)
        texts = [
            one.evaluated_value for one in facts.script.within(root)
            if isinstance(one, cst.SimpleString)
        ] if root is not None else []  # fmt: skip
        return (
            bool(texts) and isinstance(texts[-1], str) and _HELD_OUT.search(texts[-1]) is not None
        )
    is_off = literal(words.get("train")) == "False"
    return is_off or (literal(words.get("split")) or "") in ("val", "valid", "test")


def _transform(facts: Facts, call: cst.Call) -> cst.BaseExpression | None:
    """The second argument of an ImageFolder."""
    given = positional(call)
    is_folder = facts.meaning(call).endswith("ImageFolder")
    return given[1] if is_folder and len(given) > 1 else None


def _random_in(facts: Facts, transform: cst.BaseExpression) -> list[str]:
    """Random transforms of a Compose; none where it may be one of several."""
    made = [transform] if isinstance(transform, cst.Call) else facts.flow.origins(transform)
    if len(made) != 1 or not facts.meaning(made[0]).endswith("Compose"):
        return []
    return [
        facts.meaning(one).rpartition(".")[2] for one in facts.script.within(made[0])
        if isinstance(one, cst.Call) and _RANDOM.search(facts.meaning(one))
        and "transforms" in facts.meaning(one)
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
