"""The table of formats in which a model runs without the Python that made it.

    formats     what a format does (write a file, load it again), and the members
    subject     which model is meant, what goes in, and why it cannot be written
    reduced     the same model in fewer bits: fp16, bf16, int8
    trials      the inputs that a file is proved on
    proof       write, prove equal, measure: the whole of an export

It must not know runs.
"""

from ..errors import unknown
from .formats import Aoti, Exported, Format, Onnx, Scripted, Traced

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
