"""What is wrong in a model, or wastes, by one walk through it. Pure.

    Severity.BUG     a layer that does not fit, linear layers in a row, layers that nobody trains
    Severity.COST    a bias before a batch norm
    Severity.NOTE    an end in softmax or sigmoid; sizes that tensor cores pad, by their share of
                     the model's FLOPs

Source: NVIDIA, Matrix Multiplication Background, "Requirements to Use Tensor Cores"; the rules of
the same names for scripts.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ..findings import Severity
from .walk import LayerSeen, ModelWalk

_TILE = 8
"""Numbers of 16 bits."""
_TOLD = 0.01
"""Share of the model's FLOPs; padding of less is not spoken of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFinding:
    """One finding; ``module``: where in the model."""

    module: str
    rule: str
    severity: Severity
    what: str
    fix: str

    def to_json(self) -> dict[str, str]:
        return {
            "module": self.module, "rule": self.rule, "severity": self.severity.value,
            "what": self.what, "fix": self.fix,
        }  # fmt: skip


def check(seen: ModelWalk) -> list[ModelFinding]:
    """All that is found, bugs first."""
    found = [
        *_mismatches(seen), *_failed(seen), *_linear_chains(seen), *_untrained(seen),
        *_biases(seen), *_end(seen), *_sizes(seen),
    ]  # fmt: skip
    return sorted(found, key=lambda one: list(Severity).index(one.severity))


def _mismatches(seen: ModelWalk) -> Iterator[ModelFinding]:
    names = {"Linear": "in_features", "BatchNorm1d": "num_features", "BatchNorm2d": "num_features",
             "BatchNorm3d": "num_features"}  # fmt: skip
    for one in seen.layers:
        if one.wanted is None:
            continue
        word = names.get(one.kind, "in_channels")
        right = one.given[-1] if one.kind == "Linear" else one.given[1]
        batch = " (that is the number of samples)" if one.wanted == one.given[0] else ""
        yield ModelFinding(
            module=one.name, rule="feature-mismatch", severity=Severity.BUG,
            what=f"{one.kind} takes {one.wanted}{batch} and is given {_by(one.given)}",
            fix=f"{word}={right}",
        )  # fmt: skip


def _failed(seen: ModelWalk) -> Iterator[ModelFinding]:
    if seen.failed:
        yield ModelFinding(
            module="the model", rule="forward-fails", severity=Severity.BUG,
            what=f"the forward pass ends in {seen.failed}",
            fix="what comes behind it was not looked at",
        )  # fmt: skip


def _linear_chains(seen: ModelWalk) -> Iterator[ModelFinding]:
    """Runs of Linear, or of convolutions, of which each is given what the one before made."""
    by_name = {one.name: one for one in seen.layers}
    runs: dict[str, list[LayerSeen]] = {}
    for one in seen.layers:
        before = by_name.get(one.after)
        kind = "Conv" if one.kind.startswith("Conv") else one.kind
        if one.sizes and before is not None and before.sizes and before.kind.startswith(kind):
            run = runs.pop(before.name, [before])
            runs[one.name] = [*run, one]
    for run in runs.values():
        first, second = run[0], run[1]
        if len(run) == 2 and _is_factored(first, second):
            continue
        yield ModelFinding(
            module=run[0].name, rule="linear-chain", severity=Severity.BUG,
            what=f"{len(run)} layers ({', '.join(one.name for one in run)}) follow one another with "
            "no activation between: together they are one linear map",
            fix="put an activation between them, or write one layer",
        )  # fmt: skip


def _is_factored(first: LayerSeen, second: LayerSeen) -> bool:
    """A low-rank or a depthwise-separable pair is meant."""
    if first.groups > 1 or second.groups > 1:
        return True
    assert first.sizes is not None
    assert second.sizes is not None
    return first.sizes[1] < first.sizes[2] and first.sizes[1] < second.sizes[1]


def _untrained(seen: ModelWalk) -> Iterator[ModelFinding]:
    for name in seen.hidden:
        yield ModelFinding(
            module=name, rule="unregistered-modules", severity=Severity.BUG,
            what="layers stand in a plain list or dict: parameters() does not have them",
            fix="nn.ModuleList(...) or nn.ModuleDict(...)",
        )  # fmt: skip
    if seen.unused:
        shown = ", ".join(seen.unused[:4])
        more = f" and {len(seen.unused) - 4} more" if len(seen.unused) > 4 else ""
        yield ModelFinding(
            module=seen.unused[0].rpartition(".")[0] or "the model", rule="unused-parameters",
            severity=Severity.COST, what=f"no gradient reaches {shown}{more}",
            fix="use what they belong to in forward(), or leave it out",
        )  # fmt: skip


def _biases(seen: ModelWalk) -> Iterator[ModelFinding]:
    by_name = {one.name: one for one in seen.layers}
    found = [
        one.after for one in seen.layers
        if one.kind.startswith("BatchNorm") and one.after in by_name
        and by_name[one.after].sizes is not None and by_name[one.after].has_bias
    ]  # fmt: skip
    if found:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        yield ModelFinding(
            module=found[0], rule="bias-before-norm", severity=Severity.COST,
            what=f"a bias right before a batch norm, which subtracts it again{more}",
            fix="bias=False",
        )  # fmt: skip


def _end(seen: ModelWalk) -> Iterator[ModelFinding]:
    kind = seen.ends_in.lower().replace("_", "")
    if kind == "softmax":
        yield ModelFinding(
            module="the output", rule="softmax-into-cross-entropy", severity=Severity.COST,
            what="the model ends in a softmax: CrossEntropyLoss has one of its own, and two of them "
            "flatten the gradients",
            fix="return the scores (logits) to the loss; take the softmax where they are shown",
        )  # fmt: skip
    if kind == "sigmoid":
        yield ModelFinding(
            module="the output", rule="sigmoid-at-end", severity=Severity.NOTE,
            what="the model ends in a sigmoid: BCEWithLogitsLoss computes it with the loss, exactly",
            fix="return the scores (logits), and use BCEWithLogitsLoss",
        )  # fmt: skip


def _sizes(seen: ModelWalk) -> Iterator[ModelFinding]:
    total = sum(_padded(one) for one in seen.layers)
    for one in seen.layers:
        if one.sizes is None or not total:
            continue
        wasted = _padded(one) - one.flops
        if wasted / total < _TOLD:
            continue
        odd = [
            f"{name}={size}"
            for name, size in zip(("outputs", "inputs"), one.sizes[1:], strict=True)
            if size % _TILE
        ]
        yield ModelFinding(
            module=one.name, rule="tensor-core-sizes", severity=Severity.NOTE,
            what=f"{' and '.join(odd)} {'is' if len(odd) == 1 else 'are'} no multiple of {_TILE}: "
            f"padded, that is {wasted / total:.0%} of the FLOPs that tensor cores would do for this "
            "model",
            fix="round hidden sizes up to a multiple of 8",
        )  # fmt: skip


def _padded(one: LayerSeen) -> int:
    """FLOPs with N and K rounded up to whole tiles."""
    if one.sizes is None:
        return 0
    rows, outs, ins = one.sizes
    return 2 * rows * _up(outs) * _up(ins) * one.groups


def _up(size: int) -> int:
    return math.ceil(size / _TILE) * _TILE


def _by(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
