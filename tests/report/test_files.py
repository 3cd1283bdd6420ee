"""The picture of a run is legible, also printed grey."""

import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.report.chart import nice_ticks
from paceline.report.files import draw_curve
from paceline.report.summary import summarize
from resealing import reseal

SVG = "{http://www.w3.org/2000/svg}"


def texts(svg: str) -> list[str]:
    return [node.text or "" for node in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_the_picture_names_its_content_and_units(run_dir: Path) -> None:
    words = texts(draw_curve(summarize(run_dir)))
    assert "lenet, async, 2 workers" in words
    assert "seconds since the first step" in words
    assert any(word.startswith("training loss") for word in words)
    assert any(word.startswith("test accuracy") for word in words)
    assert "last 0.800" in words


def test_the_lines_differ_in_form_and_not_only_in_colour(run_dir: Path) -> None:
    lines = list(ElementTree.fromstring(draw_curve(summarize(run_dir))).iter(f"{SVG}polyline"))
    assert [line.get("stroke-dasharray") for line in lines] == [None, "7 4"]


def test_all_points_are_inside_the_picture(run_dir: Path) -> None:
    root = ElementTree.fromstring(draw_curve(summarize(run_dir)))
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    for line in root.iter(f"{SVG}polyline"):
        for pair in (line.get("points") or "").split():
            x, y = map(float, pair.split(","))
            assert 0 <= x <= width
            assert 0 <= y <= height


def test_a_falling_loss_is_drawn_from_top_left_to_bottom_right(run_dir: Path) -> None:
    root = ElementTree.fromstring(draw_curve(summarize(run_dir)))
    points = next(iter(root.iter(f"{SVG}polyline"))).get("points", "").split()
    xs, ys = zip(*(map(float, point.split(",")) for point in points), strict=True)
    assert list(xs) == sorted(xs)
    assert list(ys) == sorted(ys)  # y grows downwards


def test_a_run_without_numbers_is_drawn_as_not_measured(
    run_dir: Path, cut: Callable[[int], None]
) -> None:
    cut(3)
    assert texts(draw_curve(summarize(run_dir))).count("not measured") == 2


def test_a_name_cannot_break_the_picture(run_dir: Path) -> None:
    path = run_dir / "trace.jsonl"
    path.write_text(reseal(path.read_text().replace('"lenet"', '"<b>&"')))
    assert "<b>&, async, 2 workers" in texts(draw_curve(summarize(run_dir)))


@pytest.mark.parametrize(
    ("low", "high", "num_steps", "ticks"),
    [
        (0.5, 2.3, 4, (0.5, 1.0, 1.5, 2.0, 2.5)),
        (0.0, 73.0, 4, (0.0, 20.0, 40.0, 60.0, 80.0)),
        (-0.5, 0.5, 2, (-0.5, 0.0, 0.5)),
        (1e-4, 9e-4, 4, (0.0, 0.0002, 0.0004, 0.0006, 0.0008, 0.001)),
        (0.0, 3e-20, 3, (0.0, 1e-20, 2e-20, 3e-20)),
    ],
)
def test_ticks_are_round_and_span_the_range(
    low: float, high: float, num_steps: int, ticks: tuple[float, ...]
) -> None:
    assert nice_ticks(low, high, num_steps) == ticks


@pytest.mark.parametrize(
    ("low", "high"),
    [
        (0.0, 0.0),
        (1e17 - 0.5, 1e17 + 0.5),
        (0.0, -3.0),
        (1e300, 1e300),
        (-1e300, 1e300),
        (0.0, 5e-324),
    ],
)
def test_an_empty_or_invalid_range_has_at_least_two_ticks(low: float, high: float) -> None:
    ticks = nice_ticks(low, high, 4)
    assert len(ticks) >= 2
    assert ticks[0] < ticks[-1]


@pytest.mark.parametrize("scale", [1e17, 1e308, -1e308])
def test_losses_of_any_size_are_drawn(run_dir: Path, scale: float) -> None:
    summary = summarize(run_dir)
    points = tuple(replace(loss, value=scale * (-1) ** i) for i, loss in enumerate(summary.losses))
    drawn = draw_curve(replace(summary, losses=points))
    assert "nan" not in drawn
    assert "inf" not in drawn


@pytest.mark.parametrize("t", [-1.0, 0.0, 5e-324])
def test_a_curve_without_duration_is_drawn(run_dir: Path, t: float) -> None:
    summary = summarize(run_dir)
    points = tuple(replace(loss, t=t) for loss in summary.losses)
    there = texts(draw_curve(replace(summary, losses=points, accuracies=())))
    assert "seconds since the first step" in there
