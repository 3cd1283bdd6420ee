"""The training data are not shuffled.

Each epoch has the same batches in the same order: if the data are sorted by class or time, batches
contain one kind only, and the model oscillates.

Fix: shuffle=True in the DataLoader of training.
Source: Goodfellow, Bengio, Courville, Deep Learning, 2016, section 8.1.3.
"""

import re
from collections.abc import Iterator

import libcst as cst

from ...porting.tree import by_name
from ..examples import looped
from ..facts import Facts
from ..findings import Severity
from ..iteration import turns
from ..rule import Found, ScriptRule
from ..values import literal

_MAP_STYLE = re.compile(r"^torchvision\.datasets\.(?!Kinetics|HMDB|UCF)\w+$")


def check(facts: Facts) -> Iterator[Found]:
    for turn in turns(facts):
        for loader in facts.loaders_of_loop(turn.loop):
            if {"sampler", "batch_sampler"} & set(by_name(loader)) and "shuffle" not in by_name(
                loader
            ):
                continue
            shuffled = facts.argument(loader, "shuffle", 2)
            is_off = shuffled is None or literal(shuffled) == "False"
            if is_off and not facts.has_stars(loader) and _is_ordered(facts, loader):
                yield Found(loader, "the training loop uses this loader, which does not shuffle")


def _is_ordered(facts: Facts, loader: cst.Call) -> bool:
    """Whether a loader's data certainly have an order that matters to training."""
    data = facts.data_of(loader)
    origins = facts.flow.origins(data) if data is not None else []
    return bool(origins) and all(
        isinstance(origin, cst.Call)
        and (_MAP_STYLE.search(facts.meaning(origin)) is not None or _is_own_images(facts, origin))
        for origin in origins
    )


def _is_own_images(facts: Facts, call: cst.Call) -> bool:
    """Whether a call makes a map-style data set of images or labels that the script defines."""
    node = facts.flow.classes.get(facts.meaning(call))
    if node is None or any("Iterable" in facts.script.meaning(base.value) for base in node.bases):
        return False
    code = facts.code(node).lower()
    has_images = re.search(r"label|image|\.jpg|\.png", code) is not None
    return has_images and not re.search(r"rand|shuffle|time|seq|window|history", code)


RULE = ScriptRule.of(
    __name__, __doc__, Severity.COST, check,
    sick=(looped().replace("data = TensorDataset(torch.randn(512, 16), torch.randint(0, 8, (512,)))", "import torchvision\ndata = torchvision.datasets.MNIST('data')").replace("shuffle=True, ", ""),),
    healthy=(looped(), looped().replace("shuffle=True, ", ""),),
)  # fmt: skip
