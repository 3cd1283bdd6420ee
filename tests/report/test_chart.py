"""Charts: ticks are at their values, and curves end with the axis."""

import re
import xml.etree.ElementTree as ElementTree

import pytest

from paceline.report.chart import Curve, Diagram, draw_chart
from paceline.report.text import Point

SVG = "{http://www.w3.org/2000/svg}"


def points(*pairs: tuple[float, float]) -> tuple[Point, ...]:
    return tuple(Point(t=t, value=value) for t, value in pairs)


def drawn(*diagrams: Diagram) -> ElementTree.Element:
    return ElementTree.fromstring(draw_chart("title", "subtitle", diagrams))


def heights_of_ticks(root: ElementTree.Element) -> dict[float, float]:
    """Value -> pixel of the vertical axis."""
    result = {}
    for node in root.iter(f"{SVG}text"):
        if node.get("text-anchor") == "end" and re.fullmatch(r"-?[\d.]+", node.text or ""):
            result[float(node.text or "")] = float(node.get("y", 0)) - 4
    return result


def test_ticks_are_drawn_at_their_values() -> None:
    """-0.2 to 1 in steps of 0.2: a second rounding once moved the lowest one to -0.5."""
    curve = Curve(name="a", points=points((0, 0.84), (1, -0.12)))
    ticks = heights_of_ticks(drawn(Diagram(label="y", curves=(curve,), x_label="x")))
    assert sorted(ticks) == pytest.approx([-0.2, 0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    steps = {round(ticks[low] - ticks[round(low + 0.2, 1)], 1) for low in sorted(ticks)[:-1]}
    assert len(steps) == 1


def test_a_curve_is_cut_off_at_the_end_of_the_axis() -> None:
    curve = Curve(name="a", points=points((0, 0.0), (10, 1.0)), dots=points((2, 0.2), (10, 1.0)))
    root = drawn(Diagram(label="y", curves=(curve,), x_label="x", stop=5.0))
    (line,) = root.iter(f"{SVG}polyline")
    last = (line.get("points") or "").split()[-1]
    assert float(last.split(",")[0]) == pytest.approx(720 - 24)
    assert len(list(root.iter(f"{SVG}circle"))) == 2  # one in the legend, one of two dots


def test_a_name_has_one_style_in_every_diagram() -> None:
    a, b = (Curve(name=name, points=points((0, 0), (1, 1))) for name in "ab")
    root = drawn(
        Diagram(label="one", curves=(a, b), x_label="x"), Diagram(label="two", curves=(b,))
    )
    colours = [line.get("stroke") for line in root.iter(f"{SVG}polyline")]
    assert colours[1] == colours[2] != colours[0]


def test_a_mark_beyond_every_curve_is_inside_the_axis() -> None:
    curve = Curve(name="a", points=points((0, 0.3), (1, 0.2)))
    mark = (0.4, "target: 0.4")
    root = drawn(Diagram(label="y", curves=(curve,), x_label="x", from_zero=True, mark=mark))
    ticks = heights_of_ticks(root)
    assert max(ticks) == 0.4
    (label,) = (node for node in root.iter(f"{SVG}text") if node.text == "target: 0.4")
    assert float(label.get("y", 0)) == pytest.approx(ticks[0.4] + 16)


@pytest.mark.parametrize("odd", ["\x1b[31m", "\udcff", "\ufffe", "\0"])
def test_a_name_with_characters_that_xml_forbids_is_drawn_without_them(odd: str) -> None:
    curve = Curve(name=f"a{odd}b", points=points((0, 0.0), (1, 1.0)))
    diagram = Diagram(label=f"<y>{odd}", curves=(curve,), x_label="x")
    drawing = draw_chart(f"title{odd}\N{GREEK SMALL LETTER MU}", "subtitle", (diagram,)).encode()
    words = [node.text or "" for node in ElementTree.fromstring(drawing).iter(f"{SVG}text")]
    shown = "\ufffd" + odd[1:]
    assert {f"a{shown}b", f"<y>{shown}", f"title{shown}\N{GREEK SMALL LETTER MU}"} <= set(words)
