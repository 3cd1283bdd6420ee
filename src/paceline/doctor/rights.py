"""What a script does right, line by line, and why: the other half of an annotated listing.

    drop_last=True       every batch has one size
    ReLU                 between two linear layers; a comparison, no exponential
    Linear(64, 128)      multiples of 8: tensor cores need no padding
    zero_grad, autocast, no_grad, unscale_ before clipping      where they belong

As with rules, nothing uncertain is reported. This module must not know how the listing is printed.
"""

from collections.abc import Iterator
from typing import NamedTuple

import libcst as cst

from .facts import Facts
from .iteration import CallRole, turns
from .layers import ACTIVATIONS, FUNCTIONS, chains
from .samples import inputs_of

_TILE = 8
_CHEAP = {"ReLU", "LeakyReLU", "ReLU6", "Hardtanh", "relu", "relu_", "leaky_relu", "relu6"}
"""Activations that compute a comparison and no exponential."""


class Right(NamedTuple):
    """One thing that a line does right, with the reason."""

    line: int
    what: str


def rights(facts: Facts) -> list[Right]:
    """Return what a script does right, in the order of the lines, each once per line."""
    lines = {
        (facts.script.line(node), what)
        for find in (_layers, _data, _loaders, _turns, _contexts)
        for node, what in find(facts)
    }
    return [Right(line, what) for line, what in sorted(lines)]


def _layers(facts: Facts) -> Iterator[tuple[cst.CSTNode, str]]:
    for chain in chains(facts):
        for place, layer in enumerate(chain.layers):
            if layer.kind in ACTIVATIONS | FUNCTIONS and 0 < place < len(chain.layers) - 1:
                cheap = (
                    ", and it is cheap: a comparison, no exponential"
                    if layer.kind in _CHEAP
                    else ""
                )
                yield (
                    layer.node,
                    f"{layer.kind} keeps the layers around it from being one linear map{cheap}",
                )
            sizes = [size for size in (layer.ins, layer.outs) if size is not None]
            whole = [str(size) for size in sizes if size % _TILE == 0]
            if (layer.kind == "Linear" or layer.is_conv) and whole:
                are = "is a multiple" if len(whole) == 1 else "are multiples"
                yield (
                    layer.node, f"{' and '.join(whole)} {are} of 8: tensor cores need no "
                    "padding",
                )  # fmt: skip


def _data(facts: Facts) -> Iterator[tuple[cst.CSTNode, str]]:
    for chain in chains(facts):
        layer = chain.layers[0]
        for data in inputs_of(facts, chain):
            axis = -1 if layer.kind == "Linear" else 1
            if layer.ins is not None and len(data.input) > 1 and data.input[axis] == layer.ins:
                yield (
                    layer.node,
                    f"it takes the {layer.ins} features or channels that the data have",
                )


def _loaders(facts: Facts) -> Iterator[tuple[cst.CSTNode, str]]:
    for loader in facts.loaders:
        if facts.flag(loader, "drop_last"):
            yield (
                loader,
                (
                    "drop_last=True: every batch has the same size, so nothing is compiled or "
                    "tuned again for the last one"
                ),
            )
        size = facts.batch_size(loader)
        if size is not None and size >= _TILE and size % _TILE == 0:
            yield loader, f"{size} samples a batch: a multiple of 8"
        if facts.flag(loader, "pin_memory") and facts.has_accelerator:
            yield loader, "pin_memory=True: copies to the device can overlap with computing"


def _turns(facts: Facts) -> Iterator[tuple[cst.CSTNode, str]]:
    order = facts.script.order
    for turn in turns(facts):
        zero, backward, step, unscale, clip = (
            turn.of(role)
            for role in (CallRole.ZERO, CallRole.BACKWARD, CallRole.STEP, CallRole.UNSCALE,
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
            yield (
                unscale[0].call,
                "unscale_ comes before clipping: the norm is that of the true gradients",
            )


def _contexts(facts: Facts) -> Iterator[tuple[cst.CSTNode, str]]:
    for call in facts.forward_calls():
        if facts.is_in(call, r"no_grad$|inference_mode$"):
            yield call, "under no_grad(): no graph is kept for an evaluation"
        if facts.is_in(call, "autocast$"):
            yield call, "under autocast: matrix products in 16 bits where the device has them"
    for turn in turns(facts):
        for backward in turn.of(CallRole.BACKWARD):
            if "autocast" in facts.uncommented and not facts.is_in(backward.call, "autocast$"):
                yield backward.call, "backward() is outside autocast, as it should be"
