"""Gradients in fewer bytes: the table of compressors by name, and the parser of their names.

    own gradient --(+)--> x --> encode --> sent ==link==> of all members --> decode --> mean
                    ^     |                  |
           residual |     +----- x - sent ---+     kept once the update is final
                    +----------- residual for the next update

    base            the contract, and the operations between members that an exchange consists of
    casts           fp16, bf16: half as many bits, added up in that type
    quantized       int8, int4: integers with a scale per block; each member adds up one part
    sparse          topk: the largest numbers and their indices
    low_rank        powersgd: two thin matrices in place of each matrix

    price           the cost of a compressor on this machine, and what it saves on the link

A new compressor is a file here and one line in the table; the tests in tests/compression run over
the table. `exchange/compressed.py` carries out the operations. This file is imported where torch is
not, so the table names its classes as text.
"""

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..errors import ConfigError
from ..fields import NameNumber, read_name, spelled, written

if TYPE_CHECKING:
    from .base import Compressor

MILLION = 1_000_000


class Percentage(NameNumber):
    """The share in ``name:share%``, above 0 and at most 100 %, read as a number of millionths."""

    kinds: ClassVar[tuple[str, str]] = ("a percentage", "percentages")

    def read(self, text: str) -> int:
        digits = text.strip()
        share = float(digits.removesuffix("%")) / 100
        if not (digits.endswith("%") and 1 / MILLION <= share <= 1.0):
            raise ValueError(text)
        return round(share * MILLION)

    def write(self, value: int) -> str:
        return f"{value * 100 / MILLION:.6g}%"


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """A compressor's entry in the table.

    Attributes:
        made_by: the class, as ``module:name``.
        summary: one line for --help and the documentation.
        sends: the bytes that a member sends per update, as a formula of n numbers of s bytes and
            P members.
        arguments: the number in the name, if it takes one.
    """

    made_by: str
    summary: str
    sends: str
    arguments: tuple[NameNumber, ...] = ()


COMPRESSORS: dict[str, Listed] = {
    "fp16": Listed(
        made_by="casts:Fp16",
        summary="16 bits a number, 11 of them digits, up to 65504",
        sends="2 (P-1)/P 2n",
    ),
    "bf16": Listed(
        made_by="casts:Bf16",
        summary="16 bits a number, 8 of them digits, the range of float32",
        sends="2 (P-1)/P 2n",
    ),
    "int8": Listed(
        made_by="quantized:Int8",
        summary="8 bits a number, and a scale for each 1024 or fewer",
        sends="2 (P-1) b (4 + 4⌈n/4bP⌉), b = ⌈n/1024P⌉ blocks a part",
    ),
    "int4": Listed(
        made_by="quantized:Int4",
        summary="4 bits a number, and a scale for each 128 or fewer",
        sends="2 (P-1) b (4 + 4⌈n/8bP⌉), b = ⌈n/128P⌉ blocks a part",
    ),
    "topk": Listed(
        made_by="sparse:TopK",
        summary="only the largest numbers, and where they stand",
        sends="(P-1) k (4 + s), k = ⌈Sn⌉",
        arguments=(
            Percentage(
                symbol="S%",
                meaning="of the gradient's numbers are sent, above 0% and at most 100%",
                minimum=0,
                example=MILLION // 100,
            ),
        ),
    ),
    "powersgd": Listed(
        made_by="low_rank:PowerSgd",
        summary="each matrix as a product of two thin ones",
        sends="2 (P-1)/P s (Σ R (rows + columns) + numbers in no such matrix)",
        arguments=(
            NameNumber(
                symbol="R", meaning="rank of what is sent of a matrix", minimum=1, example=2
            ),
        ),
    ),
}

NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Compression:
    """The compressor that ``--compress`` asks for.

    Attributes:
        value: the number in the name, a percentage in millionths; None if there is none.
    """

    name: str
    value: int | None = None

    def __str__(self) -> str:
        if self.value is None:
            return self.name
        (argument,) = COMPRESSORS[self.name].arguments
        return written(self.name, [argument.write(self.value)])

    @property
    def kind(self) -> "type[Compressor]":
        """The compressor's class. Imports torch."""
        module, _, name = COMPRESSORS[self.name].made_by.partition(":")
        kind: type[Compressor] = getattr(importlib.import_module(f".{module}", __name__), name)
        return kind


def parse(text: str) -> Compression | None:
    """Return the compression that ``name`` or ``name:number`` stands for; None for ``none``.

    Raises:
        ConfigError: the name is unknown, or its number is missing, not a number, or out of range.

    Example:
        >>> str(parse("topk:1%"))
        'topk:1%'
        >>> parse("none") is None
        True
    """
    members: dict[str, tuple[NameNumber, ...]] = {NONE: ()}
    members |= {name: listed.arguments for name, listed in COMPRESSORS.items()}
    name, values = read_name(text, "compressor", members, {})
    if name == NONE:
        return None
    for argument, value in zip(members[name], values, strict=True):
        if value < argument.minimum:
            raise ConfigError(
                f"{spelled(name, members[name])} needs {argument.symbol} >= {argument.minimum} "
                f"({argument.meaning}), got {text}; try {written(name, [argument.shown])}"
            )
    return Compression(name=name, value=next(iter(values), None))
