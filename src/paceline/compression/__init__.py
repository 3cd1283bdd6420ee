"""Gradients in fewer bytes: the compressors by name, and how a name becomes one.

    own gradient --(+)--> x --> encode --> sent ==link==> of all members --> decode --> mean
                    ^     |                  |
           residual |     +----- x - sent ---+     kept when the update stands
                    +----------- residual of the next one

    base            the contract, and the operations between members that an exchange is made of
    casts           fp16, bf16: half as many bits, added up as they are
    quantized       int8, int4: whole numbers and a scale a block, reduced at one member a part
    sparse          topk: the largest numbers and where they stand
    low_rank        powersgd: two thin matrices in place of each one

    price           what a compressor costs on this machine beside what it saves on the link

A new compressor is a file here and one line in the table; the tests in tests/compression run over
the table. Who carries the operations is `exchange/compressed.py`. This file is read where torch is
not imported: members of the table are named as text.
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
    """The share in ``name:share%``, above 0 and at most 100 %; its number counts millionths."""

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
    """A compressor of the table.

    Attributes:
        made_by: its class, as ``module:name``.
        sends: what a member sends for an update, as a formula: n numbers of s bytes, P members.
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
    """What ``--compress`` asks for.

    Attributes:
        value: its number; of a percentage in millionths.
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
        """Its class; imports torch."""
        module, _, name = COMPRESSORS[self.name].made_by.partition(":")
        kind: type[Compressor] = getattr(importlib.import_module(f".{module}", __name__), name)
        return kind


def parse(text: str) -> Compression | None:
    """The compression that ``name`` or ``name:number`` means; None: ``none``.

    Raises:
        ConfigError: the name is unknown, its number is missing, not one, or out of its range.

    Example:
        >>> str(parse("topk:1%"))
        'topk:1%'
        >>> parse("none") is None
        True
    """
    members: dict[str, tuple[NameNumber, ...]] = {NONE: ()}
    members |= {name: one.arguments for name, one in COMPRESSORS.items()}
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
