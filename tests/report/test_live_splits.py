"""Splits measured and predicted: the table, its verdict, the picture."""

from dataclasses import replace
from xml.etree import ElementTree

import pytest

from paceline.report.live_splits import (
    LiveSplit,
    LiveSplits,
    draw_live_splits,
    render_live_splits,
)


def row(name: str, *steps_s: float, predicted_s: float | None = 0.010, why: str = "") -> LiveSplit:
    return LiveSplit(
        split=name, steps_s=steps_s, sent_bytes=1024.0 if steps_s else None,
        memory_bytes=2048.0 if steps_s else None, balance=0.5 if steps_s else None,
        predicted_step_s=predicted_s, predicted_sent_bytes=512, predicted_memory_bytes=4096,
        predicted_balance=1.0, why=why,
    )  # fmt: skip


FOUND = LiveSplits(
    task="small", workers=2, batch_size=64, rounds=1, updates=12, load=0.0,
    about={"model": "of three layers"},
    rows=(row("none", 0.010, 0.020, 0.030), row("data", 0.040), row("layer", why="it has none")),
    advised="data", fastest="none",
)  # fmt: skip


@pytest.mark.parametrize(
    ("advised", "fastest", "words"),
    [
        ("data", "none", "advised: data; fastest measured: none, in 50% of its time"),
        ("none", "none", "advised: none, which is the fastest measured"),
        ("layer", "none", "advised: layer, which was not run; fastest measured: none"),
        ("2x2", "none", "advised: 2x2, which was not run; fastest measured: none"),
    ],
)
def test_the_verdict_compares_the_advice_with_the_fastest_split(
    advised: str, fastest: str, words: str
) -> None:
    assert render_live_splits(replace(FOUND, advised=advised, fastest=fastest))[-1] == words


def test_a_split_that_was_not_run_has_no_figures_and_a_reason() -> None:
    lines = render_live_splits(FOUND)
    none = next(line for line in lines if line.startswith("none"))
    assert none.split()[1:8] == ["20", "ms", "15", "ms", "to", "25", "ms"]
    layer = next(line for line in lines if line.startswith("layer"))
    assert layer.split() == [
        "layer", "-", "-", "10", "ms", "-", "512", "B", "-", "4.0", "KiB", "-", "1.00", "not", "run"
    ]  # fmt: skip
    assert "layer: it has none" in lines


def test_bars_are_proportional_to_their_figures() -> None:
    picture = draw_live_splits(FOUND)
    bars = [
        float(node.attrib["width"])
        for node in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}rect")
        if "fill-opacity" in node.attrib
    ]
    steps = bars[:6]  # measured and predicted of each split
    assert steps[0] == pytest.approx(2 * steps[1], abs=0.2)
    assert steps[2] == pytest.approx(2 * steps[0], abs=0.2)
    assert steps[4] == 0.0
    assert picture.count("not run") == 3
