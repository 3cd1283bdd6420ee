"""What a run will do, in numbers, before its first step.

The plan is shown before anything is trained, so that a wrong batch, learning rate or protocol is
seen while it is still cheap. This module must not know how the numbers were found, nor terminals
beyond lines of plain text.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import NamedTuple

from .errors import ProtocolError

_WAYS = {"peers": "between peers", "collective": "by torch.distributed", "shared": "in memory"}
"""A path in words, other than the store's."""


class LayerParameters(NamedTuple):
    """The parameters of one layer, without those of its sublayers.

    Attributes:
        name: in the model; empty: the model itself.
        kind: its class.
        shapes: of its parameters, in their order: ``406 x 784, 406``; of one that an earlier layer
            has, too, ``shared``.
        num_parameters: without shared ones.
        num_trainable: of those.
        num_bytes: of those.
    """

    name: str
    kind: str
    shapes: str
    num_parameters: int
    num_trainable: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressionPrice:
    """What sending fewer bytes costs, beside what it saves; all of one worker and one update.

    Attributes:
        compressor: as it is written.
        plain_bytes, sent_bytes: that a worker sends without it, and with it.
        spent_s: to encode and decode, measured on gradients of this model.
        plain_s, sent_s: on the link, without it and with it; None: the link is unknown.
        latency_s, bytes_per_s: of that link, as measured between the workers; None: unknown.
    """

    compressor: str
    plain_bytes: float
    sent_bytes: float
    spent_s: float
    plain_s: float | None = None
    sent_s: float | None = None
    latency_s: float | None = None
    bytes_per_s: float | None = None

    @property
    def wins(self) -> bool | None:
        """Whether more is saved than spent; None: unknown."""
        if self.plain_s is None or self.sent_s is None:
            return None
        return self.plain_s - self.sent_s > self.spent_s

    def header(self) -> dict[str, float | None]:
        """Its figures, under the names that a trace's first line has."""
        return {
            "plain_bytes": round(self.plain_bytes),
            "sent_bytes": round(self.sent_bytes),
            "coding_s": self.spent_s,
            "plain_link_s": self.plain_s,
            "sent_link_s": self.sent_s,
        }

    def render(self) -> str:
        """``int8: 3.3 MiB -> 857.0 KiB that a worker sends an update; it loses here: ...``."""
        sizes = f"{format_bytes(self.plain_bytes)} -> {format_bytes(self.sent_bytes)}"
        text = f"{self.compressor}: {sizes} that a worker sends an update"
        if self.plain_s is None or self.sent_s is None:
            return f"{text}; {_ms(self.spent_s)} spent, what the link saves is not known"
        verb = "wins" if self.wins else "loses"
        saved = self.plain_s - self.sent_s
        return (
            f"{text}; compressing {verb} here: {_ms(saved)} saved, {_ms(self.spent_s)} spent "
            f"({self._link()})"
        )

    def _link(self) -> str:
        rate = "" if self.bytes_per_s is None else f"{self.bytes_per_s / 1e6:,.1f} MB/s, "
        return f"link: {rate}{(self.latency_s or 0.0) * 1e6:.0f} us a message, measured"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.{1 if abs(seconds) < 0.1 else 0}f} ms"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The plan of one run.

    Args:
        task: name of the task or script.
        source: the data, in one line: ``Fashion-MNIST (60,000 + 10,000)``.
        workers: seats in the run.
        device: where the workers compute.
        engine: what carries facts and bytes.
        path: ``store`` (push and pull), ``peers`` (each member updates its share) or ``collective``
            (an all-reduce, each member updates all).
        protocol: with its number and its staleness rule: ``k-sync:3``, ``async+inverse``.
        staleness: the rule for stale gradients; ``none`` where there is none or it does nothing.
        outer: the optimizer that steps on the mean of what local steps have changed; ``none``
            where there is none.
        fragments, overlap: in which parts that is exchanged, and local steps until it is merged.
        local_steps: of a worker, an update.
        mini_batch_size: m, samples a push.
        pushes_per_update: K, pushes an update.
        samples_per_update: samples that an update averages.
        accumulate: mini-batches that a worker computes for a push, one after the other.
        updates_per_epoch: updates an epoch; None where unknown before the run.
        epochs: epochs, or None without a limit.
        updates_total: updates of the whole run, or None without a limit.
        lr: learning rate at the start; nan where the optimizer has none.
        num_parameters: parameters of the model, shared ones once.
        update_bytes: bytes of gradients that one update moves.
        shared_bytes: memory that the store takes.
        grain: where work in flight can be abandoned: ``between layers``.
        notes: sentences that the user should read before the run.
        parameter_table: the layers of the model, where they were asked for.
        compression: of gradients; None: they are sent whole.
        collective: what sums the gradients of peers: ``shared``, ``native`` or a schedule; empty:
            the store does.
        collective_why: in words.
        split: how the model is cut, and what a step takes then; empty: each worker has all of it.
        update_floor: what moving an update's bytes takes at least, in words; empty: unknown.
    """

    task: str
    source: str
    workers: int
    device: str
    engine: str
    path: str
    protocol: str
    mini_batch_size: int
    pushes_per_update: int
    samples_per_update: int
    updates_per_epoch: int | None
    epochs: int | None
    updates_total: int | None
    lr: float
    num_parameters: int
    update_bytes: int
    shared_bytes: int
    grain: str
    notes: tuple[str, ...] = ()
    staleness: str = "none"
    outer: str = "none"
    fragments: int = 1
    overlap: int = 0
    local_steps: int = 1
    accumulate: int = 1
    parameter_table: tuple[LayerParameters, ...] = ()
    compression: CompressionPrice | None = None
    collective: str = ""
    collective_why: str = ""
    split: str = ""
    update_floor: str = ""

    def __post_init__(self) -> None:
        for name in ("workers", "mini_batch_size", "pushes_per_update", "samples_per_update"):
            if getattr(self, name) < 1:
                raise ProtocolError(f"a plan needs {name} >= 1, got {getattr(self, name)}")

    def rows(self) -> tuple[tuple[str, str], ...]:
        """The plan as pairs of a label and its text."""
        batches = f"{self.samples_per_update:,} samples an update"
        if self.samples_per_update == self.pushes_per_update * self.mini_batch_size:
            batches += f" = {self.pushes_per_update} x {self.mini_batch_size} (K x m)"
        else:
            batches += f" in K = {self.pushes_per_update} pushes of at most {self.mini_batch_size}"
        if self.accumulate > 1:
            batches += f", a push of {self.accumulate} mini-batches, one after the other"
        is_mapped = (self.path, self.collective) == ("collective", "shared")
        way = _WAYS.get("shared" if is_mapped else self.path, "through the store")
        outer = f"{self.outer} on the mean of what local steps have changed"
        return (
            ("task", self.task),
            ("data", self.source),
            ("workers", f"{self.workers} on {self.device}, engine {self.engine}, {way}"),
            ("protocol", self.protocol),
            *([("outer optimizer", outer)] if self.outer != "none" else []),
            *self._fragments_row(),
            *self._collective_row(),
            *([("split", self.split)] if self.split else []),
            ("batch", batches),
            ("updates", self._updates()),
            ("learning rate", "the optimizer has none" if math.isnan(self.lr) else f"{self.lr:g}"),
            ("parameters", f"{self.num_parameters:,}"),
            ("bytes an update", self._bytes()),
            *([] if self.compression is None else [("compress", self.compression.render())]),
            ("shared memory", format_bytes(self.shared_bytes)),
            ("cancellation", self.grain),
        )

    def render(self) -> list[str]:
        """The plan as lines of plain text."""
        rows = self.rows()
        width = max(len(label) for label, _ in rows)
        lines = [f"{label:<{width}}  {text}" for label, text in rows]
        lines += [f"{'note':<{width}}  {note}" for note in self.notes]
        return [*lines, *self.parameter_lines()]

    def parameter_lines(self) -> list[str]:
        """The table of parameters, where it was asked for."""
        return list(_parameter_lines(self.parameter_table))

    def to_json(self) -> dict[str, object]:
        """The fields under their names; a learning rate that does not exist is null."""
        fields: dict[str, object] = asdict(self)
        fields["lr"] = None if math.isnan(self.lr) else self.lr
        fields["notes"] = list(self.notes)
        fields["parameter_table"] = [one._asdict() for one in self.parameter_table]
        return fields

    def _fragments_row(self) -> list[tuple[str, str]]:
        """What is exchanged how often, and when it is merged."""
        if self.fragments == 1 and not self.overlap:
            return []
        size, steps = format_bytes(self.update_bytes / self.pushes_per_update), self.local_steps
        text = f"1, all {size} every {_steps(steps)}"
        if self.fragments > 1:
            text = (
                f"{self.fragments}: one of at most {size} every {_steps(steps)}, each every "
                f"{_steps(steps * self.fragments)}, all in the last update of an epoch"
            )
        if self.overlap:
            text += f"; merged by halves {_steps(self.overlap)} later, under way meanwhile"
            if self.path != "collective":
                text = text.removesuffix(", under way meanwhile")
        return [("fragments", text)]

    def _collective_row(self) -> list[tuple[str, str]]:
        if not self.collective or self.workers == 1:
            return []
        return [("collective", f"{self.collective}: {self.collective_why}")]

    def _bytes(self) -> str:
        size = format_bytes(self.update_bytes)
        return f"{size}, {self.update_floor}" if self.update_floor else size

    def _updates(self) -> str:
        an_epoch = f"{self.updates_per_epoch:,} an epoch" if self.updates_per_epoch else ""
        epochs = f"{self.epochs:,} epoch{'s' * (self.epochs != 1)}" if self.epochs else ""
        parts = [part for part in (an_epoch, epochs) if part]
        if self.updates_total is None:
            return ", ".join([*parts, "until the script ends"])
        total = f"{self.updates_total:,}"
        return f"{total} ({', '.join(parts)})" if parts else total


def _steps(count: int) -> str:
    return f"{count} local step{'s' * (count > 1)}"


def _parameter_lines(layers: tuple[LayerParameters, ...]) -> Iterator[str]:
    """A row a layer, and their sum."""
    if not layers:
        return
    total = LayerParameters(
        "total", "", "",
        sum(layer.num_parameters for layer in layers),
        sum(layer.num_trainable for layer in layers),
        sum(layer.num_bytes for layer in layers),
    )  # fmt: skip
    rows = [("layer", "type", "shape", "parameters", "trainable", "MB")]
    rows += [
        (
            one.name or "(model)", one.kind, one.shapes, f"{one.num_parameters:,}",
            f"{one.num_trainable:,}", f"{one.num_bytes / 1e6:.3f}",
        )
        for one in (*layers, total)
    ]  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    yield ""
    for row in rows:
        left = [f"{cell:<{width}}" for cell, width in zip(row[:3], widths[:3], strict=True)]
        right = [f"{cell:>{width}}" for cell, width in zip(row[3:], widths[3:], strict=True)]
        yield "  ".join([*left, *right])


def format_bytes(num_bytes: float) -> str:
    """Bytes in the largest binary unit that leaves a number of at least 1: ``3.3 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:,.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"
