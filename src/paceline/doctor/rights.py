"""What a script does right, line by line, and why: the other half of an annotated listing.

    drop_last=True       every batch has one size
    ReLU                 between two linear layers; a comparison, no exponential
    Linear(64, 128)      multiples of 8: tensor cores take them whole
    zero_grad, autocast, no_grad, unscale_ before clipping      in their place

As with rules, what is not sure is not said. This module must not know how it is shown.
"""

from collections.abc import Iterator
from typing import NamedTuple

import libcst as cst

from .facts import Facts
from .iteration import CallRole, turns
from .layers import ACTIVATIONS, FUNCTIONS, chains
from .samples import given_to

_TILE = 8
_CHEAP = {"ReLU", "LeakyReLU", "ReLU6", "Hardtanh", "relu", "relu_", "leaky_relu", "relu6"}
"""Activations that compare and do not compute an exponential."""


class Right(NamedTuple):
    """One thing that is right, in words with its reason."""

    line: int
    what: str


def rights(facts: Facts) -> list[Right]:
    """All of them, in the order of the lines, each said once a line."""
    found = {
        (facts.script.line(node), what)
        for each in (_layers, _data, _loaders, _turns, _contexts)
        for node, what in each(facts)
    }
    return [Right(line, what) for line, what in sorted(found)]


def _layers(facts: Facts) -> Iterator[tuple[cst.CSTNode, str]]:
    for chain in chains(facts):
        for place, one in enumerate(chain.layers):
            if one.kind in ACTIVATIONS | FUNCTIONS and 0 < place < len(chain.layers) - 1:
                cheap = (
                    ", and it is cheap: a comparison, no exponential" if one.kind in _CHEAP else ""
                )
                yield (
                    one.node,
                    f"{one.kind} keeps the layers around it from being one linear map{cheap}",
                )
            sizes = [size for size in (one.ins, one.outs) if size is not None]
            whole = [str(size) for size in sizes if size % _TILE == 0]
            if (one.kind == "Linear" or one.is_conv) and whole:
                are = "is a multiple" if len(whole) == 1 else "are multiples"
                yield (
                    one.node, f"{' and '.join(whole)} {are} of 8: tensor cores take "
                    f"{'it' if len(whole) == 1 else 'them'} whole",
                )  # fmt: skip


def _data(facts: Facts) -> Iterator[tuple[cst.CSTNode, str]]:
    for chain in chains(facts):
        first = chain.layers[0]
        for one in given_to(facts, chain):
            place = -1 if first.kind == "Linear" else 1
            if first.ins is not None and len(one.input) > 1 and one.input[place] == first.ins:
                yield (
                    first.node,
                    f"it takes the {first.ins} features or channels that the data have",
                )


def _loaders(facts: Facts) -> Iterator[tuple[cst.CSTNode, str]]:
    for one in facts.loaders:
        if facts.flag(one, "drop_last"):
            yield (
                one,
                (
                    "drop_last=True: every batch has the same size, and nothing is compiled or "
                    "tuned anew for the last one"
                ),
            )
        size = facts.batch_size(one)
        if size is not None and size >= _TILE and size % _TILE == 0:
            yield one, f"{size} samples a batch: a multiple of 8"
        if facts.flag(one, "pin_memory") and facts.has_accelerator:
            yield one, "pin_memory=True: copies to the device can overlap with computing"


def _turns(facts: Facts) -> Iterator[tuple[cst.CSTNode, str]]:
    order = facts.script.order
    for turn in turns(facts):
        zero, backward, step, unscale, clip = (
            turn.of(one)
            for one in (CallRole.ZERO, CallRole.BACKWARD, CallRole.STEP, CallRole.UNSCALE,
                        CallRole.CLIP)
        )  # fmt: skip
        if len(zero) == len(backward) == len(step) == 1:
            first, last = order[backward[0].call], order[step[0].call]
            if not first < order[zero[0].call] < last and first < last:
                yield (
                    zero[0].call,
                    "gradients are set to zero once a step, outside backward to step",
                )
        if unscale and clip and order[unscale[0].call] < order[clip[0].call]:
            yield unscale[0].call, "unscale_ stands before clipping: the norm is the true one"


def _contexts(facts: Facts) -> Iterator[tuple[cst.CSTNode, str]]:
    for call in facts.forward_calls():
        if facts.is_in(call, r"no_grad$|inference_mode$"):
            yield call, "under no_grad(): no graph is kept for an evaluation"
        if facts.is_in(call, "autocast$"):
            yield call, "under autocast: matrix products in 16 bits where the device has them"
    for turn in turns(facts):
        for one in turn.of(CallRole.BACKWARD):
            if "autocast" in facts.uncommented and not facts.is_in(one.call, "autocast$"):
                yield one.call, "backward() stands outside autocast, as it should"
