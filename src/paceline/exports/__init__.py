"""The table of formats in which a model runs without the Python that made it.

    base        what a format does: write a file, load it again
    torchscript, exported, aoti, onnx      the members
    subject     which model is meant, and which inputs
    reduced     the same model in fewer bits: fp16, bf16, int8
    proof       write, load, prove equal; reasons: why a model cannot be written

It must not know runs.
"""

from ..errors import unknown
from .aoti import Aoti
from .base import Format
from .exported import Exported
from .onnx import Onnx
from .torchscript import Scripted, Traced

FORMATS: dict[str, Format] = {
    form.name: form for form in (Scripted(), Traced(), Exported(), Aoti(), Onnx())
}


def find_format(name: str) -> Format:
    """The format called ``name``.

    Raises:
        ConfigError: there is none; the known ones are listed.
    """
    if name not in FORMATS:
        raise unknown("format", name, FORMATS)
    return FORMATS[name]
