"""How a model is split over n workers of this machine: where to cut it, and all ways in one table.

spec -> split_costs.prepare -> SplitCosts -> best_cut, even_cut, try_all_cuts -> PartitionReport
                                    `------> price_splits --------------------> SplitReport
"""

import time
from dataclasses import replace

from ..collectives.base import LinkCost
from ..errors import ConfigError
from ..partition.brute_force import MOST_NODES, MOST_TRIES, is_too_many, try_all_cuts
from ..partition.costs import LARGE_MODEL, SplitCosts
from ..partition.cuts import best_cut, uneven
from ..partition.placement import Placement, check_parts, even_cut, is_allowed, pipeline_step
from ..partition.prices import price_splits
from ..plan import format_bytes
from ..report.splits import CutRow, PartitionReport, SplitReport
from ..splits.tracing import TracedModel
from .split_costs import USUAL_MICRO_BATCHES, PreparedModel, prepare
from .split_models import SplitQuestion, is_too_large, on_meta


def partition(question: SplitQuestion) -> PartitionReport:
    """The cut for a number of workers, beside the even one and the best of all.

    Raises:
        ConfigError: there is no such model, it has fewer pieces, or nothing fits.
    """
    num = question.micro_batches or USUAL_MICRO_BATCHES
    question = replace(question, micro_batches=num)

    def check(traced: TracedModel, batch_size: int) -> None:
        if why := uneven(batch_size, num):
            raise ConfigError(f"{why} (--micro-batches), or give another --batch-size")
        kept = [f"{one.name} is kept whole: {one.why}" for one in traced.kept]
        check_parts(len(traced.pieces), question.num_workers, "; ".join(kept[:2]))

    made = prepare(question, check)
    costs = made.costs
    micro_batch = costs.batch_size / num
    graph, pipeline = costs.graph_at(micro_batch), costs.pipeline
    start_s = time.perf_counter()
    result = best_cut(graph, pipeline, costs.places)
    took_s = time.perf_counter() - start_s
    cuts = {"best": result.placement, "even": even_cut(graph, pipeline)}
    about = _about(question, made)
    if len(graph) <= MOST_NODES:
        if is_too_many(graph, pipeline):
            about += (("of all cuts", f"too many to try: more than {MOST_TRIES:,}"),)
        else:
            tried = try_all_cuts(graph, pipeline)
            assert tried is not None
            cuts["of all cuts"] = tried
    rows = tuple(_row(costs, name, cut) for name, cut in cuts.items())
    table = price_splits(costs)
    return PartitionReport(
        about=about,
        graph=graph,
        schedule=pipeline.schedule,
        rows=rows,
        alone_s=table.prices[0].step_s or 0.0,
        is_exact=result.is_exact,
        num_borders=result.num_borders,
        search_s=took_s,
    )


def _row(costs: SplitCosts, name: str, cut: Placement) -> CutRow:
    pipeline, cores = costs.pipeline, costs.places
    other = "gpipe" if pipeline.schedule == "1f1b" else "1f1b"
    return CutRow(
        name=name,
        placement=cut,
        run=pipeline_step(cut, pipeline, cores),
        other=pipeline_step(cut, pipeline, cores, other),
        update_s=max(part.update_s + part.first_s for part in cut.parts) * costs.sharing,
        fits=is_allowed(cut, pipeline),
    )


def plan_splits(question: SplitQuestion) -> SplitReport:
    """The table of all ways to split.

    Raises:
        ConfigError: there is no such model.
    """
    made = prepare(question)
    notes = []
    if made.num_parameters >= LARGE_MODEL:
        notes.append(
            f"{made.num_parameters:,} parameters: from {LARGE_MODEL:,} on, shards or a cut"
        )
    table = price_splits(made.costs)
    for name in ("none", "data"):
        row = next((price for price in table.prices if price.name == name), None)
        if row is not None and not row.fits:
            held = format_bytes(row.memory_bytes + made.costs.process_bytes)
            notes.append(f"one copy does not fit: {name} takes {held} of each worker")
            break
    return SplitReport(about=_about(question, made), table=table, notes=tuple(notes))


def wants_splits(question: SplitQuestion) -> bool:
    """Whether a model is so large that how it is split comes before anything else."""
    made = on_meta(question)
    if made is None:
        return False
    num_parameters = sum(parameter.numel() for parameter in made.model.parameters())
    return num_parameters >= LARGE_MODEL or is_too_large(made.model)


def _turns(costs: SplitCosts) -> str:
    longer = round(100 * (costs.turns - 1))
    return f", whose turns take {longer} % more (measured)" if longer else ""


def _about(question: SplitQuestion, made: PreparedModel) -> tuple[tuple[str, str], ...]:
    """What was measured and how, in rows of a label and its text."""
    traced, costs = made.traced, made.costs
    rows = [
        ("model", f"{made.subject.name}: {made.num_parameters:,} parameters, "
                  f"{len(traced.pieces)} pieces by {traced.how}"),
        ("batch", f"{costs.batch_size} samples an update, {_micro_batches(question, costs)}"),
        ("workers", f"{costs.num_workers} of {costs.threads} thread{'s' * (costs.threads > 1)} on "
                    f"{costs.cores:g} cores{_turns(costs)}"),
        ("messages", f"{costs.pipeline.link.latency_s * 1e6:.0f} us and "
                     f"{_rate(costs.pipeline.link)} ({made.link_source})"),
    ]  # fmt: skip
    if question.speeds:
        rows.append(("speeds", ", ".join(f"{speed:g}" for speed in question.speeds)))
    if question.memory_bytes is not None:
        own = format_bytes(costs.process_bytes)
        rows.append(
            ("memory", f"{format_bytes(question.memory_bytes)} a worker, of which {own} are "
                       f"Python's and torch's own")
        )  # fmt: skip
    if made.is_counted:
        rows.append(("costs", "counted, not measured: this model is larger than the memory here"))
    if made.load > costs.cores / 2:
        rows.append(
            ("note", f"others compute here (load {made.load:.1f}): all times are longer than alone")
        )
    rows += [("kept whole", f"{one.name}: {one.why}") for one in traced.kept]
    if traced.batch_statistics:
        names = traced.batch_statistics
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        rows.append(
            ("batch norm", f"{', '.join(names[:3])}{more} look at the whole batch: micro-batches "
                           f"or shares of it compute something else")
        )  # fmt: skip
    return tuple(rows)


def _micro_batches(question: SplitQuestion, costs: SplitCosts) -> str:
    if question.micro_batches is None:
        named = " unless 1f1b or interleaved is named" * (costs.pipeline.schedule == "gpipe")
        return f"as many micro-batches as a run takes, by {costs.pipeline.schedule}{named}"
    return f"{question.micro_batches} micro-batches"


def _rate(link: LinkCost) -> str:
    return f"{1e-6 / link.s_per_byte:,.0f} MB/s" if link.s_per_byte else "no limit of bytes"
