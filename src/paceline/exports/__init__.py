"""The table of formats in which a model runs without the Python that made it.

base.py          what a format does: write a file, load it again
torchscript.py   exported.py   aoti.py   onnx.py      the members
reasons.py       why a model cannot be written: the construct and the line
reduced.py       the same model in fewer bits: fp16, bf16, int8
shapes.py        inputs as they are written on a command line
proof.py       write, prove equal, measure: the whole of an export
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
