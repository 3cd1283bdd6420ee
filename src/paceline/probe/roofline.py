"""The roofline of a model: each layer against what this machine can do.

    operations a second
        |          ________________  products of matrices, as measured by `paceline probe`
        |        /        x
        |      /   x                 a layer: x is its operations for each byte,
        |    /  x                    y the operations a second that it reached
        +--------------------------- operations a byte

A layer is a module that calls no other module. It runs alone, forward, on the inputs that the model
passes to it. Its operations are those of its matrix products and convolutions; its bytes are its
inputs, outputs and parameters, each once. Its least time is the larger of operations / ceiling of
arithmetic and bytes / ceiling of memory; its share is that time over the measured time. A share
above 1 means that its data were in a cache, which is faster.

    model   |--|layer|----|layer|layer|-|     work between the layers, such as functional attention,
                                              is one more row; its bytes are the inputs and outputs
                                              of each operation

Torch's attention fast path for inference is disabled: its operations are not counted, and training
does not use it. Above 300 lines, since measurement, table and picture are one file.

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
"""Number of layers that a picture names: the slowest ones."""


def _attention(query: Any, key: Any, value: Any, *_: object, **__: object) -> int:
    """Return the operations for these shapes."""
    return int(sdpa_flop_count(query, key, value))


_UNCOUNTED = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention}
"""An operator whose operations torch counts on devices only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRoof(Measured):
    """One layer, forward, all its calls together; or the work between layers.

    Args:
        operations: of matrix products and convolutions; 0: it has none.
        num_bytes: inputs, outputs and parameters.
        took_s: the shortest of a few runs.
        share: of the ceiling.
        bound: ``arithmetic`` or ``memory``, whichever ceiling applies.
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
    """A model's layers against a machine's ceilings.

    Args:
        op_per_s: ceiling of matrix products in the model's number format.
        bytes_per_s: ceiling of memory.
        source: where both come from.
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
        """Total time of all rows."""
        return sum(layer.took_s for layer in self.layers)

    @property
    def share(self) -> float:
        """Share of the ceiling, all rows together."""
        least_s = sum(layer.share * layer.took_s for layer in self.layers)
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
    """Measure every layer alone, forward, and the work between the layers.

    Raises:
        ConfigError: the machine was not probed, or the model does not run.
    """
    if batch_size < 1:
        raise ConfigError(f"--batch-size must be >= 1, got {batch_size}")
    model = subject.model.to(device).eval()
    inputs = tuple(tensor.to(device) for tensor in subject.inputs(batch_size))
    number_format = _format(model, inputs)
    op_per_s, bytes_per_s, source = _ceilings(device, number_format)
    ceilings = op_per_s, bytes_per_s
    with torch.no_grad(), _as_in_training():
        calls = _calls(model, inputs)
        rows = _joined([_row(call, ceilings) for call in calls])
        rows += _rest(model, inputs, calls, ceilings)
    return Roofline(
        name=subject.name, batch_size=batch_size, device=str(device), number_format=number_format,
        op_per_s=op_per_s, bytes_per_s=bytes_per_s, source=source, layers=tuple(rows),
    )  # fmt: skip


def _format(model: nn.Module, inputs: Sequence[Tensor]) -> str:
    floats = [
        tensor.dtype for tensor in (*model.parameters(), *inputs) if tensor.is_floating_point()
    ]
    dtype = floats[0] if floats else torch.float32
    if dtype not in _NAMES:
        raise ConfigError(
            f"no ceiling is measured for {dtype}, only for {', '.join(_NAMES.values())}"
        )
    return _NAMES[dtype]


def _ceilings(device: torch.device, number_format: str) -> tuple[float, float, str]:
    machine = read_machine()
    is_cpu = device.type == "cpu"
    rate = machine.matmul_op_per_s(device.type, number_format)
    width = machine.get("memory_read_bytes_per_s" if is_cpu else "device_copy_bytes_per_s")
    if rate is None or width is None:
        why = machine.why_not or f"the file has no figures for {number_format} on {device.type}"
        raise ConfigError(
            f"a roofline needs the ceilings of this machine ({why}); run {COMMAND} first"
        )
    return rate, width, machine.source


@contextmanager
def _as_in_training() -> Iterator[None]:
    """Disable torch's attention fast path, which only inference uses."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _calls(model: nn.Module, inputs: tuple[Tensor, ...]) -> list[_Call]:
    """Return each call of a module that calls no other module, with its inputs."""
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
    return [call for call in calls if call.is_layer]


def _note(calls: list[_Call], under_way: list[_Call], name: str) -> Callable[..., None]:
    def _called(module: nn.Module, inputs: tuple[Any, ...], named: Mapping[str, object]) -> None:
        for call in under_way[-1:]:  # it calls another module, so it is no layer: drop its inputs
            call.is_layer, call.inputs, call.named = False, (), {}
        calls.append(_Call(module, name, _copied(inputs), _copied(named)))
        under_way.append(calls[-1])

    return _called


def _leave(under_way: list[_Call]) -> None:
    under_way.pop()


def _copied(values: Any) -> Any:
    """Clone the tensors, since a layer may change its inputs in place."""
    return torch.utils._pytree.tree_map(
        lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, values
    )


def _row(call: _Call, ceilings: _Ceilings) -> LayerRoof:
    inputs = _tensors((call.inputs, call.named))
    versions = [tensor._version for tensor in inputs]
    with FlopCounterMode(display=False, custom_mapping=_UNCOUNTED) as flops:
        outputs = _tensors(call.module(*call.inputs, **call.named))
    is_changed = versions != [tensor._version for tensor in inputs]
    memory = {tensor.untyped_storage()._cdata for tensor in inputs}
    is_view = not is_changed and all(
        tensor.untyped_storage()._cdata in memory for tensor in outputs
    )
    moved = [] if is_view else [*inputs, *outputs]  # a view moves nothing
    num_bytes = sum(tensor.nbytes for tensor in (*moved, *call.module.parameters()))
    took_s = _least_s(lambda: elapsed_s(lambda: call.module(*call.inputs, **call.named)))
    need = float(flops.get_total_flops()), num_bytes
    return _roof(call.name or "(model)", type(call.module).__name__, need, took_s, ceilings)


def _least_s(measure: Callable[[], float]) -> float:
    """Return the shortest of a few measurements."""
    times_s = [measure()]
    while len(times_s) < 3 or (len(times_s) < _MOST_RUNS and sum(times_s) < _ENOUGH_S):
        times_s.append(measure())
    return min(times_s)


def _roof(
    name: str, kind: str, need: tuple[float, int], took_s: float, ceilings: _Ceilings
) -> LayerRoof:
    """Build a row; ``need`` is (operations, bytes)."""
    arithmetic_s, memory_s = (amount / most for amount, most in zip(need, ceilings, strict=True))
    return LayerRoof(
        name=name, kind=kind, operations=need[0], num_bytes=need[1], took_s=took_s,
        share=max(arithmetic_s, memory_s) / took_s,
        bound="arithmetic" if arithmetic_s > memory_s else "memory" if need[1] else "nothing",
    )  # fmt: skip


def _rest(
    model: nn.Module, inputs: tuple[Tensor, ...], calls: Sequence[_Call], ceilings: _Ceilings
) -> list[LayerRoof]:
    """Return the row of the work between layers, or no row if there is none."""
    layers = list({id(call.module): call.module for call in calls}.values())
    with FlopCounterMode(display=False, custom_mapping=_UNCOUNTED) as flops:
        operations = _between(model, inputs, layers, flops.get_total_flops)
    with Launches() as launches:
        num_bytes = int(_between(model, inputs, layers, lambda: launches.num_bytes))
    if not num_bytes:
        return []
    is_cpu = all(tensor.device.type == "cpu" for tensor in inputs)
    clock = time.perf_counter if is_cpu else _now_s  # a CPU queues nothing
    took_s = _least_s(lambda: _between(model, inputs, layers, clock))
    kind = type(model).__name__
    return [_roof(BETWEEN, kind, (operations, num_bytes), took_s, ceilings)]


def _between(
    model: nn.Module,
    inputs: tuple[Tensor, ...],
    layers: Sequence[nn.Module],
    read: Callable[[], float],
) -> float:
    """Return by how much ``read`` grows outside the layers during one call of the model."""
    inside = entered_s = 0.0

    def enters(*_: object) -> None:
        nonlocal entered_s
        entered_s = read()

    def leaves(*_: object) -> None:
        nonlocal inside
        inside += read() - entered_s

    handles = [layer.register_forward_pre_hook(enters) for layer in layers]
    handles += [layer.register_forward_hook(leaves) for layer in layers]
    own_inputs = _copied(inputs)
    try:
        start = read()
        model(*own_inputs)
        return read() - start - inside
    finally:
        for handle in handles:
            handle.remove()


def _now_s() -> float:
    """Return the time once the device has no queued work."""
    synchronize()
    return time.perf_counter()


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def _joined(rows: Sequence[LayerRoof]) -> list[LayerRoof]:
    """Merge the calls of each layer into one row."""
    by_name: dict[str, list[LayerRoof]] = {}
    for row in rows:
        by_name.setdefault(row.name, []).append(row)
    return [
        LayerRoof(
            name=name, kind=calls[0].kind, bound=calls[0].bound,
            operations=sum(row.operations for row in calls),
            num_bytes=sum(row.num_bytes for row in calls), took_s=sum(row.took_s for row in calls),
            share=sum(row.share * row.took_s for row in calls) / sum(row.took_s for row in calls),
        )
        for name, calls in by_name.items()
    ]  # fmt: skip


# -- how it is shown -------------------------------------------------------------------------------


def render_roofline(roofline: Roofline) -> list[str]:
    """Return the lines: a row for each layer, then the total."""
    rows = [
        (
            layer.name, layer.kind, _operations(layer.operations), format_bytes(layer.num_bytes),
            f"{layer.intensity:.3g}" if layer.operations else "-", three_figures(layer.took_s),
            Unit.OPERATIONS.render(layer.per_s) if layer.operations else "-", layer.bound,
            f"{layer.share:.0%}" if layer.num_bytes else "-",
        )
        for layer in roofline.layers
    ]  # fmt: skip
    header = ("layer", "type", "operations", "bytes", "op/byte", "took", "reached", "bound by",
              "of the ceiling")  # fmt: skip
    ridge = roofline.op_per_s / roofline.bytes_per_s
    lines = [
        f"{roofline.name}, batch {roofline.batch_size}, forward, "
        f"{roofline.number_format} on {roofline.device}",
        f"ceilings: {Unit.OPERATIONS.render(roofline.op_per_s)}, "
        f"{Unit.BYTES.render(roofline.bytes_per_s)}, which meet at {ridge:.3g} operations a byte "
        f"({roofline.source})", "", *table(header, rows), "",
        f"all together: {three_figures(roofline.took_s)}, {roofline.share:.0%} of the ceiling",
    ]  # fmt: skip
    if any(layer.share > 1 for layer in roofline.layers):
        lines.append(
            "more than 100 %: the layer's data were in a cache, which is faster than memory"
        )
    return lines


def _operations(count: float) -> str:
    if not count:
        return "-"
    for prefix, factor in (("G", 1e9), ("M", 1e6), ("K", 1e3)):
        if count >= factor:
            return f"{count / factor:.3g} {prefix}"
    return f"{count:.0f}"


def draw_roofline(roofline: Roofline) -> str:
    """Return an SVG: both axes logarithmic, a dot for each layer that has operations."""
    layers = sorted(
        (layer for layer in roofline.layers if layer.operations), key=lambda layer: -layer.took_s
    )
    ridge = roofline.op_per_s / roofline.bytes_per_s
    low_x = math.floor(math.log10(min([ridge, *(layer.intensity for layer in layers)]) / 2))
    high_x = math.ceil(math.log10(max([ridge, *(layer.intensity for layer in layers)]) * 2))
    low = math.floor(math.log10(min([roofline.op_per_s, *(layer.per_s for layer in layers)]) / 2))
    high = math.ceil(math.log10(max([roofline.op_per_s, *(layer.per_s for layer in layers)])))
    panel = chart.Panel(top=_TOP, low=low, high=high, stop=high_x - low_x, height=_HEIGHT)

    def place(intensity: float, per_s: float) -> tuple[float, float]:
        return panel.x(math.log10(intensity) - low_x), panel.y(math.log10(per_s))

    left = max(10.0**low_x, 10.0**low / roofline.bytes_per_s)
    corners = [
        (left, left * roofline.bytes_per_s),
        (ridge, roofline.op_per_s),
        (10.0**high_x, roofline.op_per_s),
    ]
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*corner) for corner in corners))
    title = (
        f"{roofline.name}, batch {roofline.batch_size}: its layers against this machine's ceilings"
    )
    num_lines = -(-len(layers[:_MOST_NAMED]) // 2)
    parts = chart.head(title, _TOP + _HEIGHT + 80 + 18 * num_lines)
    parts.append(
        chart.text(chart.LEFT, 44, f"forward, {roofline.number_format} on {roofline.device}")
    )
    ticks = [float(tick) for tick in range(low, high + 1)]
    parts += chart.frame(panel, "operations a second", ticks, is_log10=True)
    parts += chart.x_axis(panel, "operations a byte", lambda tick: f"{10.0 ** (tick + low_x):g}")
    parts.append(
        f'<polyline points="{points}" fill="none" stroke="{chart.INK}" stroke-width="2.5"/>'
    )
    parts += _dots(layers, place)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _dots(
    layers: Sequence[LayerRoof], place: Callable[[float, float], tuple[float, float]]
) -> list[str]:
    """Draw a dot for each layer and the names of the first ones below."""
    parts = list[str]()
    for number, layer in enumerate(layers):
        x, y = place(layer.intensity, layer.per_s)
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{chart.COLOURS[1]}" '
            'fill-opacity="0.7"/>'
        )
        if number < _MOST_NAMED:
            row, column = divmod(number, 2)
            left, down = chart.LEFT + column * 310, _TOP + _HEIGHT + 68 + 18 * row
            what = f"{number + 1}  {layer.name} ({layer.kind})"
            words = f"{what}, {three_figures(layer.took_s)}, {layer.share:.0%}"
            parts.append(chart.text(x + 7, y - 5, str(number + 1), size=11))
            parts.append(chart.text(left, down, words, size=12))
    return parts
