"""The figures of the paper: theory values equal the closed forms; each keeps the contract.

Sizes are small here, so agreement of simulations is not tested; `make paper` tests it.
"""

import math
import xml.etree.ElementTree as ElementTree

import pytest
import torch

from paceline import theory
from paceline.conditions.delays import parse_delay
from paceline.data.arrays import ArrayDataset
from paper.bounds import speed_up
from paper.figures import (
    FIGURES,
    figure_05,
    figure_06,
    figure_08,
    figure_09,
    figure_11,
    table_facts,
)
from paper.figures.base import (
    Claim,
    Drawing,
    Effort,
    Figure,
    Source,
    Workshop,
    number,
    reading,
    sentence,
)
from paper.page import FigureResult, page
from paper.tasks import CLASSES, Images, Repeated, Softmax, grey, metrics, objective
from paper.training import Measured, Run, Setting, train

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="session")
def images() -> Images:
    rng = torch.Generator().manual_seed(0)
    inputs = torch.randint(0, 256, (40, 1, 28, 28), generator=rng, dtype=torch.uint8)
    targets = torch.randint(0, CLASSES, (40,), generator=rng)
    return Images(train=ArrayDataset(inputs, targets), title="noise", is_the_papers=False)


@pytest.fixture
def shop(images: Images) -> Workshop:
    return Workshop(effort=Effort(share=0.01, num_seeds=1), images=lambda: images)


@pytest.mark.parametrize("figure", FIGURES.values(), ids=lambda figure: f"figure {figure.number}")
def test_figure_has_a_plot_and_claims(
    figure: Figure, shop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figure_09, "grey", lambda: grey(500))
    drawing = figure.draw(shop)
    assert drawing.claims
    assert figure.stated
    for claim in drawing.claims:
        assert "nan" not in claim.ours
        assert "inf" not in claim.ours
    if drawing.svg:
        root = ElementTree.fromstring(drawing.svg)
        words = [node.text or "" for node in root.iter(f"{SVG}text")]
        assert any(word.startswith(f"Figure {figure.number}:") for word in words)
        lines = list(root.iter(f"{SVG}polyline"))
        width, height = float(root.get("width", 0)), float(root.get("height", 0))
        assert lines
        for line in lines:
            for pair in (line.get("points") or "").split():
                x, y = map(float, pair.split(","))
                assert 0 <= x <= width
                assert 0 <= y <= height


def test_speedups_of_figure_5_equal_the_closed_form() -> None:
    for delay, _, values in figure_05.THEORY.values():
        for num_workers, value in values.items():
            result = speed_up(parse_delay(delay), num_workers)
            assert result == pytest.approx(value, abs=0.006)


def test_runtimes_of_figure_6_equal_the_closed_form() -> None:
    workers, updates = figure_06.WORKERS, figure_06.UPDATES
    for name, values in figure_06.K_SYNC.items():
        delay = parse_delay(figure_06.DELAYS[name])
        for k, value in values.items():
            one_s = theory.update_s("k-sync", delay, workers, k)
            assert one_s is not None
            assert updates * one_s == pytest.approx(value, abs=0.6)
        one_s = theory.update_s("k-batch-async", delay, workers, 1)
        assert one_s is not None
        assert updates * one_s == pytest.approx(figure_06.AN_UPDATE_OF_K_BATCH_ASYNC)


def test_times_of_figure_8_equal_the_closed_form() -> None:
    delay = parse_delay(figure_08.SETTING.delay)
    for text, whole_s in figure_08.THEORY_S.items():
        name, _, k = text.partition(":")
        pushes = int(k) if k else {"full-sync": 8, "async": 1}[name]
        one_s = theory.update_s(name, delay, 8, pushes)
        assert one_s is not None
        assert figure_08.UPDATES * one_s == pytest.approx(whole_s, abs=0.06)


def test_staleness_of_the_table_equals_theory() -> None:
    for (num_workers, k), values in table_facts.STALENESS.items():
        for name, value in zip(("k-async", "k-batch-async"), values, strict=True):
            assert theory.staleness_versions(name, num_workers, k) == pytest.approx(value)


@pytest.mark.parametrize(("ours", "agrees"), [(101.9, True), (102.1, False), (97.91, False)])
def test_number_agrees_within_its_tolerance(ours: float, agrees: bool) -> None:
    claim = number("time", 100.0, ours, error=0.5)
    assert claim.agrees is agrees
    assert claim.verdict == ("yes" if agrees else "**no**")
    assert (claim.reference, claim.tolerance) == ("100.0", "2 %")
    assert claim.ours == f"{ours:.4g} ± 0.50"


def test_value_read_from_a_plot_may_lie_near_its_range() -> None:
    def read(paper: tuple[float, float], *values: float) -> Claim:
        return reading("end", paper, list(values), band=0.1, why="so", is_comparable=True)

    inside = read((-0.05, 0.0), -0.14, -0.10)
    assert (inside.agrees, inside.deviation, inside.tolerance) == (True, "0.070", "0.1: so")
    assert not read((-0.05, 0.0), -0.16).agrees
    assert not read((-0.2, -0.2), -0.05).agrees


def test_bands_separate_the_curves_of_the_paper() -> None:
    floors = figure_11.FLOORS
    for name, floor in floors.items():
        nearest = min(abs(floor - second) for first, second in floors.items() if first != name)
        assert figure_11.BANDS[name] <= nearest / 2 + 1e-9
    assert (figure_08.END[1] - figure_08.END[0]) / 2 >= figure_08.BAND


def test_claims_on_other_data_are_not_counted() -> None:
    other = sentence("floor", "low", "high", False, is_comparable=False)
    assert other.verdict == "other data"
    plot = reading("end", (-0.2, -0.2), [0.3], band=0.1, why="so", is_comparable=True)
    claims = (number("a", 1.0, 1.0), number("b", 1.0, 2.0), plot, other)
    result = FigureResult(
        figure=FIGURES["facts"], drawing=Drawing(svg="", claims=claims), wall_s=1.0, cpu_s=1.0
    )
    lines = page([result], "a machine", "make paper")
    first = next(number for number, line in enumerate(lines) if "**1 of 2**" in line)
    assert lines[first] == "- beside theory: **1 of 2** within their tolerance"
    assert lines[first - 1] == "- beside what the paper prints: **0 of 1** within their tolerance"
    assert [line[:15] for line in lines[first - 3 : first - 1]] == ["**Not so here**"] * 2
    assert lines[first + 1].endswith("proves nothing: 1")
    assert "| floor | low | high |  |  | other data |" in lines
    assert lines.index("| what | paper | ours | off by | tolerance | agrees |") < lines.index(
        "| what | theory | ours | off by | tolerance | agrees |"
    )


def test_table_rows_have_one_cell_per_column() -> None:
    claim = Claim(
        label="a", source=Source.PAPER, reference="1", ours="2", deviation="3", tolerance="4",
        agrees=True,
    )  # fmt: skip
    figure = FIGURES["facts"]
    result = FigureResult(
        figure=figure, drawing=Drawing(svg="", claims=(claim,)), wall_s=0.0, cpu_s=0.0
    )
    rows = [line for line in page([result], "", "") if line.startswith("|")]
    assert {row.count("|") for row in rows} == {7}


def test_objective_is_cross_entropy_plus_penalty(images: Images) -> None:
    model = Softmax(784, penalty=0.5)
    inputs, targets = images.train[0]
    outputs = model(inputs.unsqueeze(0))
    weight = model.linear.weight
    fit = torch.nn.functional.cross_entropy(model.linear(inputs.flatten()[None]), targets[None])
    expected = fit + 0.5 * weight.square().sum()
    assert objective(outputs, targets[None]).item() == pytest.approx(expected.item())
    assert metrics(outputs, targets[None])["loss"] == pytest.approx((expected.item(), 1.0))
    objective(outputs, targets[None]).backward()  # type: ignore[no-untyped-call]
    slope = torch.autograd.grad(fit, weight)[0] + weight  # of 0.5 ||W||^2
    assert weight.grad is not None
    assert torch.allclose(weight.grad, slope, atol=1e-6)


def test_repeated_data_set_wraps_around(images: Images) -> None:
    twice = Repeated(images.train, 2)
    count = len(images.train)
    assert len(twice) == 2 * count
    batch = twice.__getitems__([1, count + 1])
    assert torch.equal(batch.inputs[0], batch.inputs[1])
    assert torch.equal(twice[count + 3][0], images.train[3][0])


def test_run_is_measured_from_start_to_end(images: Images) -> None:
    setting = Setting(
        num_workers=4, delay="exp:1s", mini_batch_size=2, eta=0.01, penalty=0.01, num_evaluations=5
    )
    run = train(setting, images, "k-sync:2", 30, seed=0)
    assert run is train(setting, images, "k-sync:2", 30, seed=0)
    versions = [measurement.version for measurement in run.measured]
    assert (versions[0], versions[-1]) == (0, 30)
    assert 5 <= len(versions) <= 8
    assert run.measured[0].at_s == 0.0
    assert run.by_updates()[0].value == pytest.approx(math.log(math.log(10)), abs=0.1)


def test_loss_between_evaluations_is_interpolated() -> None:
    run = Run(
        measured=(
            Measured(at_s=0.0, version=0, loss=math.e**2),
            Measured(at_s=10.0, version=5, loss=math.e**1),
        ),
        updates=5, virtual_s=10.0,
    )  # fmt: skip
    assert run.loss_at(0.0) == pytest.approx(2.0)
    assert run.loss_at(10.0) == pytest.approx(1.0)
    assert 1.0 < run.loss_at(5.0) < 2.0
    assert run.loss_at(99.0) == pytest.approx(1.0)
    assert run.final == pytest.approx(1.0)
