"""Find what is wrong or wasteful in a model, from one walk through it. Pure.

    Severity.BUG     a layer that does not fit, linear layers in a row, unregistered layers
    Severity.COST    a bias before a batch norm, unused parameters, a softmax at the end
    Severity.NOTE    a sigmoid at the end; sizes that tensor cores pad, by their share of the
                     model's FLOPs

Source: NVIDIA, Matrix Multiplication Background, "Requirements to Use Tensor Cores"; the rules of
the same names for scripts.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ..findings import Severity
from .walk import LayerSeen, ModelWalk

_TILE = 8
"""Size of a tensor core's tile, in numbers of 16 bits."""
_MENTIONED = 0.01
"""Share of the model's FLOPs; less padding is not mentioned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFinding:
    """One fault of a model.

    Attributes:
        module: the path of the module in the model.
        rule: the name of the rule that it breaks.
        severity: how bad it is.
        what: what is wrong.
        fix: what to write instead.
    """

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


def check(walk: ModelWalk) -> list[ModelFinding]:
    """Return everything that is wrong or wasteful, bugs first."""
    findings = [
        *_mismatches(walk), *_failed(walk), *_linear_chains(walk), *_untrained(walk),
        *_biases(walk), *_end(walk), *_sizes(walk),
    ]  # fmt: skip
    return sorted(findings, key=lambda finding: list(Severity).index(finding.severity))


def _mismatches(walk: ModelWalk) -> Iterator[ModelFinding]:
    names = {"Linear": "in_features", "BatchNorm1d": "num_features", "BatchNorm2d": "num_features",
             "BatchNorm3d": "num_features"}  # fmt: skip
    for layer in walk.layers:
        if layer.expected is None:
            continue
        name, shape = names.get(layer.kind, "in_channels"), layer.input_shape
        actual = shape[-1] if layer.kind == "Linear" else shape[1]
        batch = " (that is the number of samples)" if layer.expected == shape[0] else ""
        yield ModelFinding(
            module=layer.name, rule="feature-mismatch", severity=Severity.BUG,
            what=f"{layer.kind} takes {layer.expected}{batch} but gets {_by(shape)}",
            fix=f"{name}={actual}",
        )  # fmt: skip


def _failed(walk: ModelWalk) -> Iterator[ModelFinding]:
    if walk.failed:
        yield ModelFinding(
            module="the model", rule="forward-fails", severity=Severity.BUG,
            what=f"the forward pass ends in {walk.failed}",
            fix="the layers after it were not checked",
        )  # fmt: skip


def _linear_chains(walk: ModelWalk) -> Iterator[ModelFinding]:
    """Yield runs of Linear layers, or of convolutions, with no activation between them."""
    by_name = {layer.name: layer for layer in walk.layers}
    runs: dict[str, list[LayerSeen]] = {}
    for layer in walk.layers:
        before = by_name.get(layer.after)
        kind = "Conv" if layer.kind.startswith("Conv") else layer.kind
        if layer.sizes and before is not None and before.sizes and before.kind.startswith(kind):
            run = runs.pop(before.name, [before])
            runs[layer.name] = [*run, layer]
    for run in runs.values():
        first, second = run[0], run[1]
        if len(run) == 2 and _is_factored(first, second):
            continue
        yield ModelFinding(
            module=run[0].name, rule="linear-chain", severity=Severity.BUG,
            what=f"{len(run)} layers ({', '.join(layer.name for layer in run)}) follow each other without "
            "an activation: together they are one linear map",
            fix="put an activation between them, or use one layer",
        )  # fmt: skip


def _is_factored(first: LayerSeen, second: LayerSeen) -> bool:
    """Whether a pair is meant as it is: low-rank, or a depthwise-separable convolution."""
    if first.groups > 1 or second.groups > 1:
        return True
    assert first.sizes is not None
    assert second.sizes is not None
    return first.sizes[1] < first.sizes[2] and first.sizes[1] < second.sizes[1]


def _untrained(walk: ModelWalk) -> Iterator[ModelFinding]:
    for name in walk.hidden:
        yield ModelFinding(
            module=name, rule="unregistered-modules", severity=Severity.BUG,
            what="layers are in a plain list or dict: parameters() does not return them",
            fix="nn.ModuleList(...) or nn.ModuleDict(...)",
        )  # fmt: skip
    if walk.unused:
        shown = ", ".join(walk.unused[:4])
        more = f" and {len(walk.unused) - 4} more" if len(walk.unused) > 4 else ""
        yield ModelFinding(
            module=walk.unused[0].rpartition(".")[0] or "the model", rule="unused-parameters",
            severity=Severity.COST, what=f"no gradient reaches {shown}{more}",
            fix="use their module in forward(), or remove it",
        )  # fmt: skip


def _biases(walk: ModelWalk) -> Iterator[ModelFinding]:
    by_name = {layer.name: layer for layer in walk.layers}
    biased = [
        layer.after for layer in walk.layers
        if layer.kind.startswith("BatchNorm") and layer.after in by_name
        and by_name[layer.after].sizes is not None and by_name[layer.after].has_bias
    ]  # fmt: skip
    if biased:
        more = f" (and {len(biased) - 1} more)" if len(biased) > 1 else ""
        yield ModelFinding(
            module=biased[0], rule="bias-before-norm", severity=Severity.COST,
            what=f"a bias right before a batch norm, which subtracts it{more}",
            fix="bias=False",
        )  # fmt: skip


def _end(walk: ModelWalk) -> Iterator[ModelFinding]:
    kind = walk.ends_in.lower().replace("_", "")
    if kind == "softmax":
        yield ModelFinding(
            module="the output", rule="softmax-into-cross-entropy", severity=Severity.COST,
            what="the model ends in a softmax: CrossEntropyLoss computes another one, and two make "
            "gradients small",
            fix="pass logits to the loss; compute the softmax only for display",
        )  # fmt: skip
    if kind == "sigmoid":
        yield ModelFinding(
            module="the output", rule="sigmoid-at-end", severity=Severity.NOTE,
            what="the model ends in a sigmoid: BCEWithLogitsLoss computes it more accurately",
            fix="return logits, and use BCEWithLogitsLoss",
        )  # fmt: skip


def _sizes(walk: ModelWalk) -> Iterator[ModelFinding]:
    total = sum(_padded(layer) for layer in walk.layers)
    for layer in walk.layers:
        if layer.sizes is None or not total:
            continue
        wasted = _padded(layer) - layer.flops
        if wasted / total < _MENTIONED:
            continue
        odd = [
            f"{name}={size}"
            for name, size in zip(("outputs", "inputs"), layer.sizes[1:], strict=True)
            if size % _TILE
        ]
        yield ModelFinding(
            module=layer.name, rule="tensor-core-sizes", severity=Severity.NOTE,
            what=f"{' and '.join(odd)} {'is not a multiple' if len(odd) == 1 else 'are not multiples'} "
            f"of {_TILE}: "
            f"padded, that is {wasted / total:.0%} of the FLOPs that tensor cores would do for this "
            "model",
            fix="round hidden sizes up to a multiple of 8",
        )  # fmt: skip


def _padded(layer: LayerSeen) -> int:
    """Return a layer's FLOPs with N and K rounded up to whole tiles."""
    if layer.sizes is None:
        return 0
    rows, outs, ins = layer.sizes
    return 2 * rows * _up(outs) * _up(ins) * layer.groups


def _up(size: int) -> int:
    return math.ceil(size / _TILE) * _TILE


def _by(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
