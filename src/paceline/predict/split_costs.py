"""Measures what a model's splits cost on this machine: finds and traces it, times it and messages.

A model that does not fit this machine's memory stays on the meta device: its operations are
counted, not run. Processes share the cores: each gets its share of them as threads, at least one.
This module must not know how a split is priced.
"""

import functools
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import psutil
from torch import Tensor, nn

from ..collectives.base import LinkCost
from ..collectives.choose import choose
from ..collectives.host import HostCost, at
from ..collectives.transfers import Action
from ..errors import ConfigError
from ..exports.subject import Subject
from ..partition.costs import Exchanges, SplitCosts
from ..partition.pipeline import MICRO_BATCHES_EACH, Pipeline, workers
from ..plan import format_bytes
from ..run.collective import SECTION, UNMEASURED, read_measured
from ..splits.clocks import fresh_s_per_byte, measure_loopback, moved_s_per_byte, threads
from ..splits.tracing import TracedModel, trace
from ..spread.units import unit_bytes
from ..system.ceilings import read_ceilings
from ..system.pages import SMALL_BYTES, lean_heap
from ..system.processors import num_cores
from ..tuning.allocator import as_in_workers
from .exchanges import ExchangeCosts
from .measuring import MeasuredCosts, least_of, measuring_of, update_costs
from .neighbours import Neighbours, neighbours
from .split_models import SplitQuestion, find_model, is_too_large, on_meta

_USUAL_BATCH = 32
"""Batch size of a model without a task."""
USUAL_MICRO_BATCHES = 8
"""Micro-batches of an update, if only a cut is asked for."""
_LINE_BYTES = 64
"""About how many bytes a worker sends in a meeting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedModel:
    """A model that was measured, and the costs of its splits.

    Args:
        link_source: where the cost of messages is from, in words.
        is_counted: whether its operations were counted, not measured.
        load: the machine's load average before the measurement.
    """

    subject: Subject
    traced: TracedModel
    costs: SplitCosts
    link_source: str
    is_counted: bool
    load: float

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.subject.model.parameters())


def prepare(
    question: SplitQuestion,
    tell: Callable[[str], None],
    check: Callable[[TracedModel, int], None] = lambda traced, batch_size: None,
    *,
    is_cut_only: bool = False,
) -> PreparedModel:
    """Trace and measure the model.

    Args:
        tell: called with what is measured next.
        check: called with the traced model and the batch size before the measurement; may raise.
        is_cut_only: whether layers split over channels are not asked for.

    Raises:
        ConfigError: there is no such model, or it does not run.
    """
    load, num_workers = os.getloadavg()[0], question.num_workers
    process_bytes = psutil.Process().memory_info().rss
    left_bytes = _left_bytes(question.memory_bytes, process_bytes)
    sketch = on_meta(question)
    is_counted = sketch is not None and is_too_large(sketch.model)
    subject = sketch if sketch is not None and is_counted else find_model(question)
    model = subject.model.train()
    batch_size = question.batch_size or (subject.task.batch_size if subject.task else _USUAL_BATCH)
    own_threads = max(1, num_cores() // num_workers)
    inputs = partial(_on_meta, subject) if is_counted else subject.inputs
    places = num_cores() / own_threads
    traced = trace(model, inputs(least_of(batch_size)))
    check(traced, batch_size)
    with (
        nullcontext() if is_counted else neighbours(question, places, own_threads) as beside,
        as_in_workers(),
    ):
        messages = _messages(num_workers, places, beside)
        measuring = measuring_of(subject, inputs, own_threads, beside, tell)
        num = micro_batches_of(question, traced)
        wanted = (max(1, batch_size // num), batch_size)
        measured = measuring.all_of(traced, wanted, num_workers, is_cut_only=is_cut_only)
    pipeline = _pipeline(question, subject, left_bytes, messages.link, is_counted)
    costs = SplitCosts(
        batch_size=batch_size, cores=num_cores(), threads=own_threads, process_bytes=process_bytes,
        pipeline=replace(pipeline, micro_batches=num), exchanges=messages.exchanges,
        micro_batches_each=() if question.micro_batches else _each(traced),
        **_moved(model, own_threads), **_of_model(model, measured, batch_size),
    )  # fmt: skip
    return PreparedModel(
        subject=subject, traced=measured.traced, costs=costs, link_source=messages.source,
        is_counted=is_counted, load=load,
    )  # fmt: skip


def micro_batches_of(question: SplitQuestion, traced: TracedModel) -> int:
    """Return the number of micro-batches of a cut: as asked, or what fits the model."""
    usual = question.num_workers if traced.batch_statistics else USUAL_MICRO_BATCHES
    return question.micro_batches or usual


def _each(traced: TracedModel) -> tuple[int, ...]:
    """Return the possible numbers of micro-batches of a mini-batch, as spread/cut.py does."""
    return (1,) if traced.batch_statistics else MICRO_BATCHES_EACH


def _of_model(model: nn.Module, measured: MeasuredCosts, batch_size: int) -> dict[str, Any]:
    """Return those fields of `SplitCosts` that describe the model."""
    traced, graph = measured.traced, measured.graph_at(batch_size)
    return {
        "graph_at": measured.graph_at, "parts_at": measured.parts_at, "alone_s": measured.alone_s,
        "script_s": measured.script_s, "together_s": measured.together_s,
        "turns": measured.turns, "waiting": measured.waiting,
        "has_fixed_rows": traced.how == "torch.export", "batch_norms": traced.batch_statistics,
        "pairs": measured.columns.pairs, "columns_s": measured.columns.seconds,
        "undivided": measured.columns.why, "unit_bytes": unit_bytes(model),
        "buffer_kinds": len({buffer.dtype for buffer in model.buffers()}),
        "largest_bytes": max(node.parameter_bytes for node in graph.nodes),
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
    }  # fmt: skip


def _moved(model: nn.Module, own_threads: int) -> dict[str, Any]:
    """Return those fields of `SplitCosts` that say how long memory takes to be read or written."""
    with threads(own_threads):
        own_s = moved_s_per_byte()
    all_s = moved_s_per_byte()
    return {
        "moved_s_per_byte": all_s, "lone_factor": max(1.0, own_s / all_s),
        "fresh_s_per_byte": _fresh_s_per_byte(model, own_threads),
    }  # fmt: skip


def _fresh_s_per_byte(model: nn.Module, own_threads: int) -> float:
    """Return the seconds per byte of newly mapped memory; 0 if workers keep what a step frees."""
    if sum(p.nbytes for p in model.parameters()) <= SMALL_BYTES or not lean_heap(os.environ):
        return 0.0
    with threads(own_threads):
        return fresh_s_per_byte()


def _on_meta(subject: Subject, batch: int) -> tuple[Tensor, ...]:
    return tuple(tensor.to("meta") for tensor in subject.inputs(batch))


def _pipeline(
    question: SplitQuestion,
    subject: Subject,
    left_bytes: int | None,
    link: LinkCost,
    is_counted: bool,
) -> Pipeline:
    update_s_per_byte, state_copies = update_costs(subject, is_counted)
    return Pipeline(
        workers=workers(question.num_workers, left_bytes, question.speeds), link=link,
        schedule=question.schedule or ("gpipe" if subject.task is None else "1f1b"),
        state_copies=state_copies, update_s_per_byte=update_s_per_byte,
    )  # fmt: skip


def _left_bytes(memory_bytes: int | None, process_bytes: int) -> int | None:
    """Return the bytes of a worker's memory that are left for the model; None: no limit."""
    if memory_bytes is None:
        return None
    if memory_bytes <= process_bytes:
        raise ConfigError(
            f"--memory {format_bytes(memory_bytes)} is less than Python and torch alone "
            f"take: {format_bytes(process_bytes)}"
        )
    return memory_bytes - process_bytes


class _Messages(NamedTuple):
    """The cost of messages between workers.

    Attributes:
        link: of one message between two.
        source: where ``link`` is from, in words.
    """

    link: LinkCost
    source: str
    exchanges: Exchanges


def _messages(num_workers: int, places: float, beside: Neighbours | None) -> _Messages:
    """Return the cost of messages: between neighbours, otherwise as ``paceline bench collectives``
    measured it between as many processes, otherwise over a socket.

    Args:
        places: workers that compute at the same time; if there are more, they take turns.
    """
    stored = read_measured(num_workers, *read_ceilings(SECTION)) if num_workers > 1 else UNMEASURED
    measured = None if beside is None else beside.exchanges()
    if measured is not None:
        link, source = measured.link, "measured now, between processes"
    elif stored.cost is not None:
        (small, small_s), *_, (large, large_s) = stored.cost.rounds["alone", Action.COPY]
        slope = max(0.0, large_s - small_s) / (large - small)
        link = LinkCost(latency_s=max(0.0, small_s - small * slope), s_per_byte=slope)
        source = f"measured between {num_workers} processes here, {stored.day}"
    else:
        link = measure_loopback()
        source = "loopback, measured now; paceline bench collectives measures processes"
    if measured is not None:
        return _Messages(link, source, _measured(measured, num_workers, places))
    return _Messages(link, source, _counted(stored.cost, link, num_workers, places))


def _measured(result: ExchangeCosts, num_workers: int, places: float) -> Exchanges:
    """Return measured exchanges, scaled if there are more workers than processes: by what each
    sends, (n - 1) / n of the bytes, or reads for a sum, n times as many, and by how many share the
    cores."""

    def sent(num: int) -> float:
        return (num - 1) / num

    sharing = max(1.0, num_workers / places) / max(1.0, result.size / places)
    factor = sharing * sent(num_workers) / sent(result.size)
    return Exchanges(
        sum_s=lambda size, num: sharing * num / result.size * at(result.sum_s, size),
        gather_s=lambda size: factor * at(result.gather_s, size),
        reduce_s=lambda size: factor * at(result.reduce_s, size),
        meeting_s=sharing * result.meeting_s, turn_s=sharing * result.turn_s,
    )  # fmt: skip


def _counted(cost: HostCost | None, link: LinkCost, num_workers: int, places: float) -> Exchanges:
    """Return exchanges by the cost of messages and what spread/units.py moves: to gather, its piece
    is read and written; to reduce, gradients are read, written and read, and of its piece, read and
    written, a sum is read and written."""
    byte_s = moved_s_per_byte() * num_workers

    @functools.cache
    def sum_s(size: float, num: int) -> float:
        if num == 1 or not size:
            return 0.0
        if cost is not None and num == num_workers and cost.native_s:
            return at(cost.native_s, size)
        return choose(round(size), num, link, names=["ring"]).seconds * max(1.0, num / places)

    def to_all_s(size: float) -> float:
        if cost is not None:
            kind = "all" if num_workers > 2 else "ring"
            return at(cost.rounds[kind, Action.COPY], size)
        return (num_workers - 1) * link.round_s(1, size) * max(1.0, num_workers / places)

    def gather_s(size: float) -> float:
        piece = size / num_workers
        return to_all_s(piece) + 2 * piece * byte_s

    def reduce_s(size: float) -> float:
        piece = size / num_workers
        return to_all_s(piece) + (3 * size + 5 * piece) * byte_s

    return Exchanges(
        sum_s=sum_s, gather_s=gather_s, reduce_s=reduce_s, meeting_s=to_all_s(_LINE_BYTES)
    )
