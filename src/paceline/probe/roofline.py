"""Where each layer of a model stands below what this machine can do: its roofline.

    operations a second
        |          ________________  products of matrices, as `paceline probe` has measured them
        |        /        x
        |      /   x                 a layer: as many operations for a byte as it needs,
        |    /  x                    as many operations a second as it reached
        +--------------------------- operations a byte

A layer is a module that calls no other. It runs alone, forward, on what the model gives it. Its
operations are those of its products and convolutions; its bytes are its inputs, outputs and
parameters, each once. It can take no less than the longer of both: operations / ceiling of
arithmetic, bytes / ceiling of memory; its share is that over what it took. More than all of it:
what it needs lay in a cache, which is faster.

    model   |--|layer|----|layer|layer|-|     what lies between the layers, as an attention that is
                                              called as a function, is one row more: here the bytes
                                              are those that go in and out of each operation

Torch's own way of attention for inference alone is not taken: its operations are not counted, and
training does not take it. Above 300 lines, since measurement, table and picture are one file.

Source: S. Williams, A. Waterman, D. Patterson, "Roofline: An Insightful Visual Performance Model
for Multicore Architectures", Communications of the ACM 52(4), 2009.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from ..bench.clock import elapsed_s, synchronize
from ..bench.samples import Measured
from ..errors import ConfigError
from ..exports.subject import Subject
from ..machine.ceilings import COMMAND, read_machine
from ..plan import format_bytes
from ..report import chart
from ..report.text import table, three_figures
from ..system.reasons import reason
from .copies import Launches
from .figures import Unit

BETWEEN = "(between layers)"
_ENOUGH_S, _MOST_RUNS = 0.05, 9
_NAMES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64",
}  # fmt: skip
_TOP, _HEIGHT = 80.0, 320.0
_MOST_NAMED = 12
"""Layers that a picture names: those that take longest."""


def _attention(query: Any, key: Any, value: Any, *_: object, **__: object) -> int:
    """Operations by the shapes."""
    count: int = sdpa_flop_count(query, key, value)
    return count


_UNCOUNTED = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention}
"""What torch counts on devices, and not on a CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRoof(Measured):
    """One layer, forward, all of its calls together; or what lies between them.

    Args:
        operations: of products of matrices and convolutions; 0: it has none.
        num_bytes: inputs, outputs and parameters.
        took_s: the least of a few.
        share: of what the machine can do at most for it.
        bound: ``arithmetic`` or ``memory``: what that is limited by.
    """

    name: str
    kind: str
    operations: float
    num_bytes: int
    took_s: float
    share: float
    bound: str

    @property
    def intensity(self) -> float:
        """Operations a byte."""
        return self.operations / self.num_bytes if self.num_bytes else 0.0

    @property
    def per_s(self) -> float:
        """Operations a second."""
        return self.operations / self.took_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline(Measured):
    """A model's layers below a machine's ceilings.

    Args:
        op_per_s: of products of matrices in the model's format.
        bytes_per_s: of memory.
        source: where both are from.
    """

    name: str
    batch_size: int
    device: str
    number_format: str
    op_per_s: float
    bytes_per_s: float
    source: str
    layers: tuple[LayerRoof, ...]

    @property
    def took_s(self) -> float:
        """Of all rows."""
        return sum(one.took_s for one in self.layers)

    @property
    def share(self) -> float:
        """Of all rows together."""
        least_s = sum(one.share * one.took_s for one in self.layers)
        return least_s / self.took_s if self.took_s else 0.0

    def to_json(self) -> dict[str, object]:
        """As one JSON object (docs/json.md)."""
        return {**Measured.to_json(self), "took_s": self.took_s, "share": self.share}


@dataclass(slots=True)
class _Call:
    module: nn.Module
    name: str
    inputs: tuple[Any, ...]
    named: dict[str, Any]
    is_layer: bool = True


_Ceilings = tuple[float, float]
"""Operations a second, bytes a second."""


def measure_roofline(subject: Subject, batch_size: int, device: torch.device) -> Roofline:
    """Every layer forward, alone, and what the model computes between them.

    Raises:
        ConfigError: the machine was not probed, or the model does not run.
    """
    if batch_size < 1:
        raise ConfigError(f"--batch-size must be >= 1, got {batch_size}")
    model = subject.model.to(device).eval()
    inputs = tuple(one.to(device) for one in subject.inputs(batch_size))
    number_format = _format(model, inputs)
    op_per_s, bytes_per_s, source = _ceilings(device, number_format)
    ceilings = op_per_s, bytes_per_s
    with torch.no_grad(), _as_in_training():
        calls = _calls(model, inputs)
        rows = _joined([_row(one, ceilings) for one in calls])
        rows += _rest(model, inputs, calls, ceilings)
    return Roofline(
        name=subject.name, batch_size=batch_size, device=str(device), number_format=number_format,
        op_per_s=op_per_s, bytes_per_s=bytes_per_s, source=source, layers=tuple(rows),
    )  # fmt: skip


def _format(model: nn.Module, inputs: Sequence[Tensor]) -> str:
    floats = [one.dtype for one in (*model.parameters(), *inputs) if one.is_floating_point()]
    dtype = floats[0] if floats else torch.float32
    if dtype not in _NAMES:
        raise ConfigError(
            f"no ceiling is measured for {dtype}; known are {', '.join(_NAMES.values())}"
        )
    return _NAMES[dtype]


def _ceilings(device: torch.device, number_format: str) -> tuple[float, float, str]:
    known = read_machine()
    is_cpu = device.type == "cpu"
    rate = known.matmul_op_per_s(device.type, number_format)
    width = known.get("memory_read_bytes_per_s" if is_cpu else "device_copy_bytes_per_s")
    if rate is None or width is None:
        why = known.why_not or f"it says nothing of {number_format} on {device.type}"
        raise ConfigError(f"a roofline needs what this machine can do ({why}); run {COMMAND} first")
    return rate, width, known.source


@contextmanager
def _as_in_training() -> Iterator[None]:
    """Without what torch computes attention by in inference alone."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _calls(model: nn.Module, inputs: tuple[Tensor, ...]) -> list[_Call]:
    """Each call of a module that calls no other, with what the model gave it."""
    calls, under_way = list[_Call](), list[_Call]()
    handles = list[Any]()
    for name, module in model.named_modules():
        note = _note(calls, under_way, name)
        handles.append(module.register_forward_pre_hook(note, with_kwargs=True))
        handles.append(module.register_forward_hook(lambda *_: _leave(under_way)))
    try:
        model(*_copied(inputs))
    except Exception as error:  # the user's model may raise anything
        raise ConfigError(f"the model does not run: {reason(error)}") from error
    finally:
        for handle in handles:
            handle.remove()
    return [one for one in calls if one.is_layer]


def _note(calls: list[_Call], under_way: list[_Call], name: str) -> Callable[..., None]:
    def _called(module: nn.Module, inputs: tuple[Any, ...], named: Mapping[str, object]) -> None:
        for one in under_way[-1:]:  # it calls another, so it is none, and its inputs may go
            one.is_layer, one.inputs, one.named = False, (), {}
        calls.append(_Call(module, name, _copied(inputs), _copied(named)))
        under_way.append(calls[-1])

    return _called


def _leave(under_way: list[_Call]) -> None:
    under_way.pop()


def _copied(values: Any) -> Any:
    """A layer may change in place what it is given."""
    return torch.utils._pytree.tree_map(
        lambda one: one.clone() if isinstance(one, Tensor) else one, values
    )


def _row(call: _Call, ceilings: _Ceilings) -> LayerRoof:
    given = _tensors((call.inputs, call.named))
    versions = [one._version for one in given]
    with FlopCounterMode(display=False, custom_mapping=_UNCOUNTED) as counted:
        outputs = _tensors(call.module(*call.inputs, **call.named))
    is_changed = versions != [one._version for one in given]
    memory = {one.untyped_storage()._cdata for one in given}
    is_view = not is_changed and all(one.untyped_storage()._cdata in memory for one in outputs)
    moved = [] if is_view else [*given, *outputs]  # who only looks at it otherwise moves nothing
    num_bytes = sum(one.nbytes for one in (*moved, *call.module.parameters()))
    took_s = _least_s(lambda: elapsed_s(lambda: call.module(*call.inputs, **call.named)))
    need = float(counted.get_total_flops()), num_bytes
    return _roof(call.name or "(model)", type(call.module).__name__, need, took_s, ceilings)


def _least_s(measure: Callable[[], float]) -> float:
    """Of a few."""
    taken = [measure()]
    while len(taken) < 3 or (len(taken) < _MOST_RUNS and sum(taken) < _ENOUGH_S):
        taken.append(measure())
    return min(taken)


def _roof(
    name: str, kind: str, need: tuple[float, int], took_s: float, ceilings: _Ceilings
) -> LayerRoof:
    """A row; ``need``: operations and bytes."""
    arithmetic_s, memory_s = (one / most for one, most in zip(need, ceilings, strict=True))
    return LayerRoof(
        name=name, kind=kind, operations=need[0], num_bytes=need[1], took_s=took_s,
        share=max(arithmetic_s, memory_s) / took_s,
        bound="arithmetic" if arithmetic_s > memory_s else "memory" if need[1] else "nothing",
    )  # fmt: skip


def _rest(
    model: nn.Module, inputs: tuple[Tensor, ...], calls: Sequence[_Call], ceilings: _Ceilings
) -> list[LayerRoof]:
    """The row of what the model computes between its layers; none where that is nothing."""
    layers = list({id(one.module): one.module for one in calls}.values())
    with FlopCounterMode(display=False, custom_mapping=_UNCOUNTED) as counted:
        operations = _between(model, inputs, layers, counted.get_total_flops)
    with Launches() as launches:
        num_bytes = int(_between(model, inputs, layers, lambda: launches.num_bytes))
    if not num_bytes:
        return []
    is_cpu = all(one.device.type == "cpu" for one in inputs)
    clock = time.perf_counter if is_cpu else _now_s  # there nothing is queued
    took_s = _least_s(lambda: _between(model, inputs, layers, clock))
    kind = type(model).__name__
    return [_roof(BETWEEN, kind, (operations, num_bytes), took_s, ceilings)]


def _between(
    model: nn.Module,
    inputs: tuple[Tensor, ...],
    layers: Sequence[nn.Module],
    read: Callable[[], float],
) -> float:
    """By how much ``read`` grows outside of the layers while the model is called."""
    inside = begun = 0.0

    def enters(*_: object) -> None:
        nonlocal begun
        begun = read()

    def leaves(*_: object) -> None:
        nonlocal inside
        inside += read() - begun

    handles = [one.register_forward_pre_hook(enters) for one in layers]
    handles += [one.register_forward_hook(leaves) for one in layers]
    given = _copied(inputs)
    try:
        start = read()
        model(*given)
        return read() - start - inside
    finally:
        for handle in handles:
            handle.remove()


def _now_s() -> float:
    """With nothing queued any more."""
    synchronize()
    return time.perf_counter()


def _tensors(values: Any) -> list[Tensor]:
    return [one for one in torch.utils._pytree.tree_leaves(values) if isinstance(one, Tensor)]


def _joined(rows: Sequence[LayerRoof]) -> list[LayerRoof]:
    """Calls of one layer together."""
    by_name: dict[str, list[LayerRoof]] = {}
    for row in rows:
        by_name.setdefault(row.name, []).append(row)
    return [
        LayerRoof(
            name=name, kind=own[0].kind, bound=own[0].bound,
            operations=sum(one.operations for one in own),
            num_bytes=sum(one.num_bytes for one in own), took_s=sum(one.took_s for one in own),
            share=sum(one.share * one.took_s for one in own) / sum(one.took_s for one in own),
        )
        for name, own in by_name.items()
    ]  # fmt: skip


# -- how it is shown -------------------------------------------------------------------------------


def render_roofline(found: Roofline) -> list[str]:
    """A row a layer, and what all of them reach."""
    rows = [
        (
            one.name, one.kind, _operations(one.operations), format_bytes(one.num_bytes),
            f"{one.intensity:.3g}" if one.operations else "-", three_figures(one.took_s),
            Unit.OPERATIONS.render(one.per_s) if one.operations else "-", one.bound,
            f"{one.share:.0%}" if one.num_bytes else "-",
        )
        for one in found.layers
    ]  # fmt: skip
    header = ("layer", "type", "operations", "bytes", "op/byte", "took", "reached", "bound by",
              "of the ceiling")  # fmt: skip
    ridge = found.op_per_s / found.bytes_per_s
    lines = [
        f"{found.name}, batch {found.batch_size}, forward, {found.number_format} on {found.device}",
        f"ceilings: {Unit.OPERATIONS.render(found.op_per_s)}, "
        f"{Unit.BYTES.render(found.bytes_per_s)}, which meet at {ridge:.3g} operations a byte "
        f"({found.source})", "", *table(header, rows), "",
        f"all together: {three_figures(found.took_s)}, {found.share:.0%} of the ceiling",
    ]  # fmt: skip
    if any(one.share > 1 for one in found.layers):
        lines.append("more than 100 %: what the layer needs lay in a cache, which is faster")
    return lines


def _operations(count: float) -> str:
    if not count:
        return "-"
    for prefix, factor in (("G", 1e9), ("M", 1e6), ("K", 1e3)):
        if count >= factor:
            return f"{count / factor:.3g} {prefix}"
    return f"{count:.0f}"


def draw_roofline(found: Roofline) -> str:
    """The text of an SVG file: both axes logarithmic, a dot a layer that has operations."""
    layers = sorted((one for one in found.layers if one.operations), key=lambda one: -one.took_s)
    ridge = found.op_per_s / found.bytes_per_s
    low_x = math.floor(math.log10(min([ridge, *(one.intensity for one in layers)]) / 2))
    high_x = math.ceil(math.log10(max([ridge, *(one.intensity for one in layers)]) * 2))
    low = math.floor(math.log10(min([found.op_per_s, *(one.per_s for one in layers)]) / 2))
    high = math.ceil(math.log10(max([found.op_per_s, *(one.per_s for one in layers)])))
    panel = chart.Panel(top=_TOP, low=low, high=high, stop=high_x - low_x, height=_HEIGHT)

    def place(intensity: float, per_s: float) -> tuple[float, float]:
        return panel.x(math.log10(intensity) - low_x), panel.y(math.log10(per_s))

    left = max(10.0**low_x, 10.0**low / found.bytes_per_s)
    corners = [
        (left, left * found.bytes_per_s),
        (ridge, found.op_per_s),
        (10.0**high_x, found.op_per_s),
    ]
    drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*one) for one in corners))
    title = f"{found.name}, batch {found.batch_size}: its layers below this machine's ceilings"
    num_lines = -(-len(layers[:_MOST_NAMED]) // 2)
    parts = chart.head(title, _TOP + _HEIGHT + 80 + 18 * num_lines)
    parts.append(chart.text(chart.LEFT, 44, f"forward, {found.number_format} on {found.device}"))
    ticks = [float(tick) for tick in range(low, high + 1)]
    parts += chart.frame(panel, "operations a second", ticks, is_log10=True)
    parts += chart.x_axis(panel, "operations a byte", lambda tick: f"{10.0 ** (tick + low_x):g}")
    parts.append(
        f'<polyline points="{drawn}" fill="none" stroke="{chart.INK}" stroke-width="2.5"/>'
    )
    parts += _dots(layers, place)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _dots(
    layers: Sequence[LayerRoof], place: Callable[[float, float], tuple[float, float]]
) -> list[str]:
    """Each layer, and the names of the first ones below."""
    parts = list[str]()
    for number, one in enumerate(layers):
        x, y = place(one.intensity, one.per_s)
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{chart.COLOURS[1]}" '
            'fill-opacity="0.7"/>'
        )
        if number < _MOST_NAMED:
            row, column = divmod(number, 2)
            left, down = chart.LEFT + column * 310, _TOP + _HEIGHT + 68 + 18 * row
            what = f"{number + 1}  {one.name} ({one.kind})"
            words = f"{what}, {three_figures(one.took_s)}, {one.share:.0%}"
            parts.append(chart.text(x + 7, y - 5, str(number + 1), size=11))
            parts.append(chart.text(left, down, words, size=12))
    return parts
