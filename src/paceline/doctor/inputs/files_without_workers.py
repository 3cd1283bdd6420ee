"""Files are decoded in the process that trains.

The device waits while the next batch is read, decoded and cropped.

Fix: num_workers of the DataLoader, as many as the CPU has cores to spare.
Source: PyTorch performance tuning guide, "Enable asynchronous data loading and augmentation".
"""

import re
from collections.abc import Iterator

import libcst as cst

from ..examples import STEP, looped
from ..facts import Facts
from ..findings import Severity
from ..iteration import turns
from ..rule import Found, ScriptRule

_FOLDERS = re.compile(r"(^|\.)datasets\.(ImageFolder|DatasetFolder|ImageNet|CelebA|Places365|Food101|Flowers102|"
                      r"OxfordIIITPet|StanfordCars|VOC\w+|Coco\w+|INaturalist|Caltech\w+)$")  # fmt: skip
_DECODES = re.compile(r"(^|\.)(imread|Image\.open|read_image|decode_image|imdecode|torchaudio\.load|"
                      r"librosa\.load|default_loader|pil_loader)$")  # fmt: skip


def check(facts: Facts) -> Iterator[Found]:
    if not facts.has_accelerator:
        return
    for turn in turns(facts):
        for loader in facts.loaders_of_loop(turn.loop):
            workers = facts.argument(loader, "num_workers", 5)
            is_none = workers is None or facts.code(workers) == "0"
            data = facts.data_of(loader)
            made = facts.flow.origins(data) if data is not None else []
            if (
                is_none
                and made
                and not facts.has_stars(loader)
                and all(_reads(facts, one) for one in made)
            ):
                yield Found(loader, "its files are decoded in the process that trains")


def _reads(facts: Facts, made: cst.BaseExpression) -> bool:
    """Whether each sample of these data is decoded from a file when it is asked for."""
    if not isinstance(made, cst.Call):
        return False
    if _FOLDERS.search(facts.meaning(made)):
        return True
    node = facts.flow.classes.get(facts.meaning(made))
    return node is not None and any(
        isinstance(one, cst.Call) and _DECODES.search(facts.meaning(one)) is not None
        for function in facts.script.within(node)
        if isinstance(function, cst.FunctionDef) and function.name.value == "__getitem__"
        for one in facts.script.within(function)
    )


_FOLDER = "import torchvision\npictures = torchvision.datasets.ImageFolder('pictures')\nloader = DataLoader(pictures, batch_size=64, shuffle=True{})"
_LOADER = "loader = DataLoader(data, batch_size=64, shuffle=True, pin_memory=True)\n"
RULE = ScriptRule.of(
    __name__, __doc__, Severity.COST, check,
    sick=(looped(STEP, before=_FOLDER.format("")).replace(_LOADER, ""),),
    healthy=(
        looped(STEP, before=_FOLDER.format(", num_workers=4")).replace(_LOADER, ""),
        looped(STEP, before=_FOLDER.format("").replace("ImageFolder", "MNIST")).replace(_LOADER, ""),
        looped(),
    ),
)  # fmt: skip
