"""The table of formats in which a model runs without the Python that made it.

    base        what a format does: write a file, load it again
    torchscript, exported, aoti, onnx      the members
    subject     which model is meant
    reasons     why a model cannot be written: the construct and the line
    reduced     the same model in fewer bits: fp16, bf16, int8
    shapes      inputs as they are written on a command line
    proof       write, prove equal, measure: the whole of an export

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
