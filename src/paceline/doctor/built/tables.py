"""Render a walk through a model, and its findings, as lines."""

from collections.abc import Iterator, Sequence

from ..findings import Severity
from .checks import ModelFinding
from .walk import ModelWalk


def render_model(name: str, walk: ModelWalk, findings: Sequence[ModelFinding]) -> Iterator[str]:
    """Yield the verdict, the findings, and every layer with its sizes and share of the FLOPs."""
    yield f"{name}: {_verdict(findings)}; {walk.num_parameters:,} parameters"
    for finding in findings:
        yield ""
        yield f"{finding.module}  {finding.rule} ({_LABELS[finding.severity]}): {finding.what}"
        yield f"    fix  {finding.fix}"
    yield ""
    total = sum(layer.flops for layer in walk.layers) or 1
    width = max((len(layer.name) for layer in walk.layers), default=1)
    for layer in walk.layers:
        sizes = f"{_by(layer.input_shape)} -> {_by(layer.output_shape)}"
        share = f"{layer.flops / total:6.1%}" if layer.flops else "      "
        misfit = f"  takes {layer.expected}" if layer.expected is not None else ""
        yield f"  {layer.name:<{width}}  {layer.kind:<16} {sizes}  {share}{misfit}"


_LABELS = {
    Severity.BUG: "bug", Severity.COST: "could cost, not measured", Severity.NOTE: "note",
}  # fmt: skip


def _verdict(findings: Sequence[ModelFinding]) -> str:
    bugs = sum(finding.severity is Severity.BUG for finding in findings)
    others = len(findings) - bugs
    if not findings:
        return "every layer fits, and nothing is wrong"
    counts = [f"{bugs} bug{'s' * (bugs != 1)}"] * bool(bugs)
    return ", ".join([*counts, *([f"{others} other finding{'s' * (others != 1)}"] * bool(others))])


def _by(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "?"
