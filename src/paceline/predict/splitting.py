"""Plans how a model is split over n workers of this machine: the best cut, and a table of all ways.

spec -> split_costs.prepare -> SplitCosts -> best_cut, even_cut, try_all_cuts -> PartitionReport
                                    `------> price_splits --------------------> SplitReport

This module must not know how costs are measured.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from ..collectives.base import LinkCost
from ..errors import ConfigError
from ..partition.brute_force import MOST_NODES, MOST_TRIES, is_too_many, try_all_cuts
from ..partition.costs import LARGE_MODEL, SplitCosts
from ..partition.cuts import best_cut, shortest, uneven
from ..partition.placement import Placement, check_parts, even_cut, is_allowed, pipeline_step
from ..partition.prices import alone_price, price_splits
from ..plan import format_bytes
from ..report.splits import CutRow, PartitionReport, SplitReport
from ..splits.tracing import TracedModel
from .split_costs import PreparedModel, micro_batches_of, prepare
from .split_models import SplitQuestion, is_too_large, on_meta


def partition(
    question: SplitQuestion, tell: Callable[[str], None] = lambda what: None
) -> PartitionReport:
    """Return the best cut for a number of workers, the even one and the best of all that there are.

    Args:
        tell: called with what is measured next.

    Raises:
        ConfigError: there is no such model, it has fewer pieces, or nothing fits.
    """
    prepared = prepare(question, tell, partial(_check, question), is_cut_only=True)
    costs = replace(prepared.costs, micro_batches_each=())
    pipeline = costs.pipeline
    question = replace(question, micro_batches=pipeline.micro_batches)
    graph = costs.part_graph(costs.batch_size / pipeline.micro_batches)
    start_s = time.perf_counter()
    result = best_cut(graph, pipeline, costs.places)
    search_s = time.perf_counter() - start_s
    cuts = {"best": result.placement, "even": even_cut(graph, pipeline)}
    about = _about(question, prepared)
    if len(graph) <= MOST_NODES:
        if is_too_many(graph, pipeline):
            about += (("of all cuts", f"too many to try: more than {MOST_TRIES:,}"),)
        else:
            best_of_all = try_all_cuts(graph, pipeline)
            assert best_of_all is not None
            known = best_of_all, result.placement  # of cuts that are as good, one may wait less
            cuts["of all cuts"] = shortest(known, pipeline, costs.places)
    rows = tuple(_row(costs, name, cut) for name, cut in cuts.items())
    return PartitionReport(
        about=about,
        graph=graph,
        schedule=pipeline.schedule,
        rows=rows,
        alone_s=alone_price(costs).step_s or 0.0,
        is_exact=result.is_exact,
        num_borders=result.num_borders,
        search_s=search_s,
    )


def _check(question: SplitQuestion, traced: TracedModel, batch_size: int) -> None:
    """Raise ConfigError where a model cannot be cut as asked."""
    _refuse_micro_batches(question, traced)
    if why := uneven(batch_size, micro_batches_of(question, traced)):
        raise ConfigError(f"{why} (--micro-batches), or give another --batch-size")
    kept = [f"{module.name} is kept whole: {module.why}" for module in traced.kept]
    check_parts(len(traced.pieces), question.num_workers, "; ".join(kept[:2]))


def _refuse_micro_batches(question: SplitQuestion, traced: TracedModel) -> None:
    """Raise ConfigError where batch norm would see parts of a worker's mini-batch."""
    num = question.micro_batches
    if traced.batch_statistics and num not in (None, question.num_workers):
        raise ConfigError(
            f"{traced.batch_statistics[0]}: batch norm looks at the whole batch, so a run takes "
            f"one micro-batch of each worker: leave --micro-batches {num} out"
        )


def _row(costs: SplitCosts, name: str, cut: Placement) -> CutRow:
    pipeline, cores = costs.pipeline, costs.places
    other = "gpipe" if pipeline.schedule == "1f1b" else "1f1b"
    return CutRow(
        name=name,
        placement=cut,
        run=pipeline_step(cut, pipeline, cores),
        other=pipeline_step(cut, pipeline, cores, other),
        update_s=max(part.update_s for part in cut.parts) * costs.sharing,
        fits=is_allowed(cut, pipeline),
    )


def plan_splits(
    question: SplitQuestion, tell: Callable[[str], None] = lambda what: None
) -> SplitReport:
    """Return the table of all ways to split.

    Args:
        tell: called with what is measured next.

    Raises:
        ConfigError: there is no such model.
    """
    prepared = prepare(question, tell, lambda traced, _: _refuse_micro_batches(question, traced))
    notes = []
    if prepared.num_parameters >= LARGE_MODEL:
        notes.append(
            f"{prepared.num_parameters:,} parameters: from {LARGE_MODEL:,} on, use shards or a cut"
        )
    table = price_splits(prepared.costs)
    for name in ("none", "data"):
        row = next((price for price in table.prices if price.name == name), None)
        if row is not None and not row.fits:
            needed = format_bytes(row.memory_bytes + prepared.costs.process_bytes)
            notes.append(f"one copy does not fit: {name} needs {needed} of each worker")
            break
    return SplitReport(about=_about(question, prepared), table=table, notes=tuple(notes))


def wants_splits(question: SplitQuestion) -> bool:
    """Return whether a model is so large that how to split it is the first question."""
    subject = on_meta(question)
    if subject is None:
        return False
    num_parameters = sum(parameter.numel() for parameter in subject.model.parameters())
    return num_parameters >= LARGE_MODEL or is_too_large(subject.model)


def _turns(costs: SplitCosts) -> str:
    percent = round(100 * (costs.turns - 1))
    return f", {percent} % slower because they share them (measured)" if percent else ""


def _about(question: SplitQuestion, prepared: PreparedModel) -> tuple[tuple[str, str], ...]:
    """Return what was measured and how, as rows of a label and a text."""
    traced, costs = prepared.traced, prepared.costs
    rows = [
        ("model", f"{prepared.subject.name}: {prepared.num_parameters:,} parameters, "
                  f"{len(traced.pieces)} pieces by {traced.how}"),
        ("batch", f"{costs.batch_size} samples an update, {_micro_batches(question, costs)}"),
        ("workers", f"{costs.num_workers} of {costs.threads} thread{'s' * (costs.threads > 1)} on "
                    f"{costs.cores:g} cores{_turns(costs)}"),
        ("messages", f"{costs.pipeline.link.latency_s * 1e6:.0f} us and "
                     f"{_rate(costs.pipeline.link)} ({prepared.link_source})"),
    ]  # fmt: skip
    if question.speeds:
        rows.append(("speeds", ", ".join(f"{speed:g}" for speed in question.speeds)))
    if question.memory_bytes is not None:
        own = format_bytes(costs.process_bytes)
        rows.append(
            ("memory", f"{format_bytes(question.memory_bytes)} a worker, of which Python and "
                       f"torch take {own}")
        )  # fmt: skip
    if prepared.is_counted:
        rows.append(
            ("costs", "counted, not measured: this model is larger than this machine's memory")
        )
    if prepared.load > costs.cores / 2:
        rows.append(
            ("note", f"other programs compute here (load {prepared.load:.1f}), so all times are "
                     f"too long")
        )  # fmt: skip
    rows += [("kept whole", f"{module.name}: {module.why}") for module in traced.kept]
    if traced.batch_statistics:
        names = traced.batch_statistics
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        rows.append(
            ("batch norm", f"{', '.join(names[:3])}{more} use statistics of a whole batch, so "
                           f"a run takes one micro-batch of each worker, its share of the batch")
        )  # fmt: skip
    return tuple(rows)


def _micro_batches(question: SplitQuestion, costs: SplitCosts) -> str:
    if question.micro_batches is None:
        unless = " unless 1f1b or interleaved is named" * (costs.pipeline.schedule == "gpipe")
        return f"as many micro-batches as a run uses, with {costs.pipeline.schedule}{unless}"
    return f"{question.micro_batches} micro-batches"


def _rate(link: LinkCost) -> str:
    return f"{1e-6 / link.s_per_byte:,.0f} MB/s" if link.s_per_byte else "an unlimited rate"
