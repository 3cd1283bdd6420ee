"""A comparison shows the numbers of the traces; its table and picture are correct and legible."""

import itertools
import json
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.report import compared
from paceline.report.chart import COLOURS, DASHES, style
from paceline.report.compared import ComparedProtocol, Comparison, RunOutcome, outcome_of
from paceline.report.compared_lines import draw_comparison, render_comparison
from paceline.report.summary import summarize
from paceline.report.text import Point

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def outcome(run_dir: Path) -> RunOutcome:
    return outcome_of(summarize(run_dir), 0, 0.7)


def comparison(
    *contenders: ComparedProtocol, target: float | None = 0.7, repeats: int = 1
) -> Comparison:
    return Comparison(
        task="lenet", workers=2, conditions="slow 1=5x, mini-batches of 20", is_simulated=True,
        target_accuracy=target, repeats=repeats, contenders=contenders, folder="runs/compare",
    )  # fmt: skip


def contender(
    protocol: str, *outcomes: RunOutcome, failures: tuple[str, ...] = ()
) -> ComparedProtocol:
    return ComparedProtocol(protocol=protocol, outcomes=outcomes, failures=failures)


def test_the_clock_stops_between_epochs(outcome: RunOutcome) -> None:
    """Epochs from 1.0 to 3.5 s and from 5.0 to 7.0 s: 2.5 and 4.5 s of training."""
    assert outcome.errors == (Point(t=2.5, value=0.4), Point(t=4.5, value=pytest.approx(0.2)))
    assert outcome.trained_s == 4.5
    assert outcome.losses[-1].t == 3.5
    assert outcome.target_s == 4.5
    assert outcome.test_error == pytest.approx(0.2)
    assert (outcome.unused_pushes, outcome.abandoned_steps, outcome.dropped_samples) == (2, 1, 20)


def test_times_outside_epochs_count_the_training_so_far(run_dir: Path) -> None:
    trained = compared._trained(summarize(run_dir))
    times = [trained(t) for t in (-1.0, 0.0, 1.0, 2.5, 3.0, 4.0, 6.0, 9.0)]
    assert times == [0.0, 0.0, 1.0, 2.5, 2.5, 2.5, 4.5, 4.5]


def test_a_missed_target_is_reported_with_the_best_value(run_dir: Path) -> None:
    missed = outcome_of(summarize(run_dir), 0, 0.9)
    assert missed.target_s is None
    text = "\n".join(render_comparison(comparison(contender("async", missed), target=0.9)))
    assert "async did not reach 0.9: best 0.8000 in 4.5 s of training (finished)" in text
    assert text.split("async", 1)[1].split()[0] == "never"


def test_a_seed_that_misses_the_target_ranks_behind_all_others(outcome: RunOutcome) -> None:
    early, late = replace(outcome, target_s=1.0), replace(outcome, target_s=3.0)
    never = replace(outcome, target_s=None)
    result = contender("async", never, late, early)
    times = result.figure("target_s")
    assert (times.median, times.least, times.most) == (3.0, 1.0, None)
    assert result.typical == late
    assert contender("async", never, never, early).figure("target_s").median is None


def test_the_table_has_the_expected_text(outcome: RunOutcome) -> None:
    slow = replace(outcome, target_s=90.0, updates=12_345)
    lines = render_comparison(
        comparison(contender("async", outcome, slow), contender("k-sync:2", outcome), repeats=2)
    )
    table = [line.rstrip() for line in lines[3:8]]
    assert table == [
        "protocol  to target test error updates an update staleness dropped unused",
        "async        47.2 s        0.2   6,174     1.5 s      0.33      20      2",
        "  least       4.5 s        0.2       3     1.5 s      0.33      20      2",
        "  most   1 min 30 s        0.2  12,345     1.5 s      0.33      20      2",
        "k-sync:2      4.5 s        0.2       3     1.5 s      0.33      20      2",
    ]
    assert max(map(len, lines)) <= 80


def test_a_failed_protocol_does_not_hide_the_others(outcome: RunOutcome) -> None:
    failed = contender("async", failures=("the loss of worker 1 is not finite",))
    both = comparison(failed, contender("k-sync:2", outcome))
    text = "\n".join(render_comparison(both))
    assert "async failed: the loss of worker 1 is not finite" in text
    assert "async, failed" in words(both)
    assert json.dumps(both.to_json(), allow_nan=False)


def test_a_protocol_that_was_not_run_has_neither_failed_nor_missed_the_target(
    outcome: RunOutcome,
) -> None:
    cut = replace(
        comparison(contender("k-sync:2", outcome), contender("async")),
        interrupted_in="async, seed 0",
    )
    text = "\n".join(render_comparison(cut))
    assert "interrupted in async, seed 0" in text
    assert text.split("\nasync", 1)[1].split("\n")[0].split() == ["-"] * 7
    assert "async, not run" in words(cut)


def test_a_comparison_without_measurements_is_no_error(outcome: RunOutcome) -> None:
    failed = comparison(contender("async", failures=("it broke",)))
    assert "it broke" in "\n".join(render_comparison(failed))
    assert "not measured" not in words(failed)
    bare = replace(outcome, errors=(), losses=(), test_error=None, target_s=None)
    assert render_comparison(comparison(contender("async", bare)))
    assert draw_comparison(comparison(contender("async", bare)))


# -- the picture -------------------------------------------------------------------------------


def elements(compared: Comparison, name: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(draw_comparison(compared)).iter(f"{SVG}{name}"))


def words(compared: Comparison) -> list[str]:
    return [node.text or "" for node in elements(compared, "text")]


def test_with_few_evaluations_the_training_loss_is_drawn_too(outcome: RunOutcome) -> None:
    two = comparison(contender("async", outcome))
    assert any(word.startswith("training loss (mean") and "< 3" in word for word in words(two))
    assert "fewer than 3 evaluations" in "\n".join(render_comparison(two))
    points = (*outcome.errors, Point(t=5.0, value=0.1))
    three = comparison(contender("async", replace(outcome, errors=points)))
    assert not any("training loss" in word for word in words(three))
    assert "virtual seconds since the first step" in words(three)
    assert "test error against virtual seconds" in render_comparison(three)


def test_every_seed_is_drawn_and_the_typical_one_is_thick(outcome: RunOutcome) -> None:
    many = [replace(outcome, target_s=float(t)) for t in (3, 1, 2)]
    lines = elements(comparison(contender("async", *many), repeats=3), "polyline")
    widths = [float(line.get("stroke-width", 0)) for line in lines]
    assert sorted(widths) == [1.0] * 4 + [2.5] * 2  # error and loss of each seed


def test_protocols_are_distinguishable_in_grey_print() -> None:
    def grey(colour: str) -> float:
        red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    assert all(abs(grey(a) - grey(b)) >= 24 for a, b in itertools.combinations(COLOURS, 2))
    assert max(map(grey, COLOURS)) < 180  # on white paper
    assert len(set(DASHES)) == len(DASHES)
    assert len({style(number) for number in range(26)}) == 26


def test_all_words_and_points_are_inside_the_picture(outcome: RunOutcome) -> None:
    names = ("stale-synchronous:12", "k-batch-async:100", "local-sgd:16")
    compared = comparison(*(contender(name, outcome) for name in names))
    root = ElementTree.fromstring(draw_comparison(compared))
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    for line in root.iter(f"{SVG}polyline"):
        for pair in (line.get("points") or "").split():
            x, y = map(float, pair.split(","))
            assert 0 <= x <= width
            assert 0 <= y <= height
    for node in root.iter(f"{SVG}text"):
        size = 0.6 * float(node.get("font-size", 0)) * len(node.text or "")
        left = float(node.get("x", 0)) - {"start": 0, "middle": size / 2, "end": size}[
            node.get("text-anchor", "start")
        ]  # fmt: skip
        assert left > 0, node.text
        assert left + size < width, node.text
        assert float(node.get("y", 0)) < height
