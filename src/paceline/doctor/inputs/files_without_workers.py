"""Files are decoded in the training process.

The device waits while the next batch is read, decoded and cropped.

Fix: set num_workers of the DataLoader to the number of spare CPU cores.
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
            has_no_workers = workers is None or facts.code(workers) == "0"
            data = facts.data_of(loader)
            origins = facts.flow.origins(data) if data is not None else []
            if (
                has_no_workers
                and origins
                and not facts.has_stars(loader)
                and all(_reads_files(facts, origin) for origin in origins)
            ):
                yield Found(loader, "its files are decoded in the training process")


def _reads_files(facts: Facts, dataset: cst.BaseExpression) -> bool:
    """Whether a data set decodes each sample from a file when it is fetched."""
    if not isinstance(dataset, cst.Call):
        return False
    if _FOLDERS.search(facts.meaning(dataset)):
        return True
    class_node = facts.flow.classes.get(facts.meaning(dataset))
    return class_node is not None and any(
        isinstance(node, cst.Call) and _DECODES.search(facts.meaning(node)) is not None
        for function in facts.script.within(class_node)
        if isinstance(function, cst.FunctionDef) and function.name.value == "__getitem__"
        for node in facts.script.within(function)
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
