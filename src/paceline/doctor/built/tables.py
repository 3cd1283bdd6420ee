"""What a walk through a model found, in lines."""

from collections.abc import Iterator, Sequence

from ..findings import Severity
from .checks import ModelFinding
from .walk import ModelWalk


def render_model(name: str, seen: ModelWalk, found: Sequence[ModelFinding]) -> Iterator[str]:
    """The verdict, what was found, and every layer with sizes and its share of the FLOPs."""
    yield f"{name}: {_verdict(found)}; {seen.num_parameters:,} parameters"
    for one in found:
        yield ""
        yield f"{one.module}  {one.rule} ({_WORDS[one.severity]}): {one.what}"
        yield f"    fix  {one.fix}"
    yield ""
    total = sum(one.flops for one in seen.layers) or 1
    width = max((len(one.name) for one in seen.layers), default=1)
    for layer in seen.layers:
        share = f"{layer.flops / total:6.1%}" if layer.flops else "      "
        odd = f"  takes {layer.wanted}" if layer.wanted is not None else ""
        yield f"  {layer.name:<{width}}  {layer.kind:<16} {_by(layer.given)} -> {_by(layer.made)}  {share}{odd}"


_WORDS = {
    Severity.BUG: "bug", Severity.COST: "could cost, not measured", Severity.NOTE: "note",
}  # fmt: skip


def _verdict(found: Sequence[ModelFinding]) -> str:
    bugs = sum(one.severity is Severity.BUG for one in found)
    others = len(found) - bugs
    if not found:
        return "every layer fits, and nothing is wrong"
    words = [f"{bugs} bug{'s' * (bugs != 1)}"] * bool(bugs)
    return ", ".join([*words, *([f"{others} other finding{'s' * (others != 1)}"] * bool(others))])


def _by(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "?"
