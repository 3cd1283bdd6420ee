"""A cut and a table of splits as text, JSON and picture."""

import xml.etree.ElementTree

import pytest

from paceline.partition.graph import TiedParameter, WorkEdge, WorkGraph, WorkNode
from paceline.partition.pipeline import Pipeline, workers
from paceline.partition.placement import even_cut, pipeline_step, place
from paceline.partition.prices import SplitPrice, SplitTable
from paceline.report.splits import (
    CutRow,
    PartitionReport,
    SplitReport,
    draw_partition,
    render_partition,
    render_splits,
)


def report() -> PartitionReport:
    """Three layers over two workers, the first and the last tied."""
    nodes = tuple(
        WorkNode(name=name, forward_s=1e-3, backward_s=2e-3, parameter_bytes=2048) for name in "abc"
    )
    edges = tuple(
        WorkEdge(name=f"e{i}", source=i, targets=(i + 1,), num_bytes=1024, gradient_bytes=1024)
        for i in range(3)
    )
    ties = (TiedParameter(name="a.weight", num_bytes=512, nodes=(0, 2)),)
    graph = WorkGraph(nodes=nodes, edges=edges, ties=ties)
    pipeline = Pipeline(workers=workers(2), micro_batches=2)
    cuts = {"best": place(graph, pipeline, (0, 1, 1)), "even": even_cut(graph, pipeline)}
    rows = tuple(
        CutRow(
            name=name, placement=cut, run=pipeline_step(cut, pipeline, 2.0),
            other=pipeline_step(cut, pipeline, 2.0, "gpipe"), update_s=0.0, fits=True,
        )
        for name, cut in cuts.items()
    )  # fmt: skip
    return PartitionReport(
        about=(("model", "three layers"),), graph=graph, schedule="1f1b", rows=rows, alone_s=12e-3,
        is_exact=True, num_borders=4, search_s=1e-4,
    )  # fmt: skip


def test_a_cut_is_drawn_with_the_bytes_over_its_border() -> None:
    lines = render_partition(report())
    assert "inputs -> [ a ] =1.0 KiB=> [ b .. c ] -> outputs" in lines
    assert "parts 0 and 1 share a.weight" in lines
    assert lines[-1] == "do not split for speed: this takes 1.25 times as long as one worker alone"


def test_the_numbers_of_the_text_are_those_of_the_json() -> None:
    result = report().to_json()
    assert result["step_s"] == pytest.approx({"best": 15e-3, "even": 13e-3})
    assert result["cut_bytes"] == 2 * 2 * 1024
    assert [part["layers"] for part in result["parts"]] == [["a"], ["b", "c"]]
    assert [part["shared_parameters"] for part in result["parts"]] == [["a.weight"], ["a.weight"]]


def test_the_picture_is_xml_with_a_bar_for_each_action() -> None:
    root = xml.etree.ElementTree.fromstring(draw_partition(report()))
    bars = [node for node in root.iter() if node.tag.endswith("rect")]
    assert len(bars) == 1 + 3 + 2 * 2 * 2


def test_the_table_shows_the_advice_and_impossible_splits() -> None:
    prices = (
        SplitPrice(name="none", step_s=1.0, memory_bytes=4096, fits=False),
        SplitPrice(name="network", step_s=None, why="only 1 piece"),
        SplitPrice(name="shard-3", step_s=2.0, sent_bytes=2048, memory_bytes=1024, balance=0.5),
    )
    table = SplitTable(prices=prices, advised=prices[2], reason="the only one that fits")
    lines = render_splits(SplitReport(about=(("model", "x"),), table=table, notes=("large",)))
    text = "\n".join(lines)
    assert "note: large" in lines
    assert "network: only 1 piece" in lines
    assert "too much memory" in text
    assert lines[-2:] == ["advice: --split shard-3", "why: the only one that fits"]
