"""A range test finds where the loss falls, and advises a rate or says that there is none."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from paceline.bench import lr_range
from paceline.bench.lr_range import (
    LrQuestion,
    LrRange,
    draw_range,
    measure_range,
    range_json,
    render_range,
)
from paceline.bench.lr_script import script_program
from paceline.bench.lr_worker import Diverging, LrRamp, growing
from paceline.context import Context
from paceline.errors import ConfigError
from paceline.exchange.solo import SoloExchange
from paceline.script.worker import Pace
from paceline.trace.records import Header

Say = Callable[[str], tuple[int, str, str]]
RAMP = LrRamp(spec="quadratic", lowest=1e-4, highest=10.0, updates=101)


def measured_range(loss: Callable[[float], float], ramp: LrRamp = RAMP) -> LrRange:
    """The measurement if the loss were this function of the logarithm of the rate."""
    rates = [ramp.rate(version) for version in range(ramp.updates)]
    return LrRange(
        question=LrQuestion(ramp=ramp, workers=2), samples=64, source="made up", rates=tuple(rates),
        losses=tuple(loss(math.log10(rate)) for rate in rates),
    )  # fmt: skip


def cliff(place: float) -> float:
    """Falls from 2 to 1 around 0.01, and rises beyond 1."""
    return 1.0 + 1.0 / (1.0 + math.exp(4.0 * (place + 2.0))) + math.exp(6.0 * (place - 0.5))


def test_rates_grow_geometrically_from_lowest_to_highest() -> None:
    rates = [RAMP.rate(version) for version in range(101)]
    assert rates[0] == 1e-4
    assert rates[-1] == pytest.approx(10.0)
    assert rates[50] == pytest.approx(math.sqrt(1e-4 * 10.0))
    assert {round(b / a, 9) for a, b in pairwise(rates)} == {round(10**0.05, 9)}


def test_rates_are_multiples_of_the_current_ones_of_the_optimizer() -> None:
    """Not of the initial rates of another run, which a loaded state contains."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5)
    optimizer.param_groups[0]["initial_lr"] = 7.0
    scheduler = growing(Pace(SoloExchange(), Context(device="cpu")), optimizer, RAMP.factor)
    assert scheduler.get_last_lr() == [0.5]


def test_loss_is_paired_with_the_rate_of_its_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a loss that is nan."""
    heard = [1.0, math.nan, *(1.0 - 0.01 * number for number in range(60))]
    monkeypatch.setattr(lr_range, "launch_run", lambda *given: None)
    monkeypatch.setattr(lr_range, "read_header", lambda path: Header(fields={"batch_size": 64}))
    monkeypatch.setattr(lr_range, "_losses", lambda run: iter(heard))
    result = measure_range(LrQuestion(ramp=RAMP, workers=2))
    assert result.rates[:3] == (RAMP.rate(0), RAMP.rate(2), RAMP.rate(3))
    assert len(result.rates) == len(result.losses) == 61


def test_advised_rate_is_where_the_loss_falls_fastest() -> None:
    result = measured_range(cliff)
    assert result.rates[result.steepest] == pytest.approx(0.01, rel=0.15)
    assert result.advised == pytest.approx(0.01, rel=0.15)
    assert result.rises is not None
    assert result.rates[result.lowest] < result.rates[result.rises] < 10.0
    lines = render_range(result)
    assert lines[-1].startswith(f"--lr {result.advised:g}: the loss falls fastest at")
    assert "from " in lines[-1]
    assert any("falls fastest" in line for line in lines[2:-1])


def test_rate_near_the_lowest_loss_is_not_advised() -> None:
    result = measured_range(lambda place: 2.0 - max(0.0, place + 1.0) ** 2 if place < 0.3 else 9.0)
    assert result.advised is not None
    assert result.advised <= result.rates[result.lowest] / 2.9
    assert "a third of that" in result.reason


def test_no_rate_is_advised_if_the_loss_does_not_fall() -> None:
    result = measured_range(lambda place: 2.0)
    assert result.advised is None
    assert render_range(result)[-1] == (
        "the loss does not fall between 0.0001 and 10: try a higher --highest, more --updates, or "
        "another --init"
    )
    assert range_json(result)["advised"] is None


@pytest.mark.parametrize(("made", "fewer"), [(20, ", or use --updates 20"), (8, "")])
def test_report_names_the_rates_a_short_script_did_not_try(made: int, fewer: str) -> None:
    def cut(loss: Callable[[float], float]) -> LrRange:
        found = measured_range(loss)
        return replace(found, rates=found.rates[:made], losses=found.losses[:made], cut_after=made)

    over = f"the script's loop ended after {made} of 101 updates: give it more epochs"
    last = f"{RAMP.rate(made - 1):.3g}"
    flat, falling = cut(lambda place: 2.0), cut(lambda place: -place)
    assert flat.reason == f"the loss does not fall between 0.0001 and {last}, and {over}{fewer}"
    words = f"; higher rates than {last} were not tried, since {over}{fewer}"
    assert falling.reason.endswith(words)
    assert range_json(falling)["cut_after"] == made
    risen = replace(measured_range(cliff), cut_after=90)
    assert "not tried" not in risen.reason  # the loss has risen again, so nothing is unknown


def test_plot_labels_powers_of_ten() -> None:
    text = draw_range(measured_range(cliff))
    ElementTree.fromstring(text)
    for words in (">0.0001<", ">0.01<", ">1<", ">10<", "learning rate", "advised: "):
        assert words in text


def test_run_ends_when_the_loss_diverges_or_is_nan() -> None:
    losses = Diverging()
    assert not any(losses.add(2.0) for _ in range(20))
    assert not losses.add(5.0)  # one batch
    assert any(losses.add(20.0) for _ in range(5))
    assert Diverging().add(math.nan)


def test_workers_diverge_at_the_rate_of_theory() -> None:
    """Plain descent on a quadratic is stable up to 2 / L, L = 1."""
    ramp = LrRamp(spec="quadratic", lowest=1e-3, highest=100.0, updates=60)
    result = measure_range(LrQuestion(ramp=ramp, workers=2, device="cpu"))
    assert result.samples == 64
    assert result.rises is not None
    assert 2.0 < result.rates[result.rises] < 20.0
    assert result.advised is not None
    assert 0.01 < result.advised < 2.0
    assert len(result.losses) < 60  # it was ended early


def test_workers_with_local_steps_diverge_at_the_reported_rate() -> None:
    """The limit is 2 / L; the noise of single steps ends it somewhat earlier."""
    ramp = LrRamp(spec="quadratic", lowest=1e-3, highest=100.0, updates=60)
    result = measure_range(LrQuestion(ramp=ramp, workers=2, protocol="local-sgd:4", device="cpu"))
    assert 0.3 < result.rates[-1] < 20.0
    assert result.advised is not None
    assert 0.01 < result.advised < 0.5  # four steps per update: sooner than with one
    assert len(result.losses) < 60


SCRIPT = """
import sys
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import paceline

torch.manual_seed(0)
inputs = torch.randn(256, 4)
targets = inputs @ torch.tensor([[1.0], [-2.0], [3.0], [0.5]]) + 0.5 * torch.randn(256, 1)
data = TensorDataset(inputs, targets)
pace = paceline.connect()
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(
    [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.02}], lr=0.01
)
model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(data, batch_size=32))
for epoch in pace.epochs(int(sys.argv[1])):
    for inputs, targets in loader:
        with pace.step():
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            with open(f"rates{pace.worker}", "a") as rates:
                print(pace.version, optimizer.param_groups[0]["lr"], file=rates)
    with torch.no_grad():
        sum(len(one) for one, _ in loader)
first, second = optimizer.param_groups
Path("evaluated").write_text(f"{second['lr'] / first['lr']}")
"""


def test_script_ends_after_the_requested_updates(say: Say, tmp_path: Path) -> None:
    """Descent on a mean of squares is stable up to a rate of about 1; no file is written."""
    (tmp_path / "train.py").write_text(SCRIPT)
    line = "tune lr train.py --workers 2 --lowest 1e-3 --updates 60 --device cpu --json"
    code, out, err = say(f"{line} -- 1000")
    assert code == 0, err
    report = json.loads(out)
    assert report["samples_per_update"] == 32
    assert report["source"] == "the script's own data"
    assert 0.003 < report["advised"] < 1.0
    assert report["losses"][-1] > 2 * min(report["losses"])
    assert len(report["losses"]) < 60  # it was ended before its last epoch
    assert report["cut_after"] is None
    assert not (tmp_path / "evaluated").exists()


def test_script_with_fewer_updates_is_measured_to_its_end(say: Say, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    line = "tune lr train.py --lowest 1e-3 --highest 0.1 --updates 60 --device cpu --json -- 2"
    code, out, err = say(line)
    assert code == 0, err
    report = json.loads(out)
    assert len(report["losses"]) == report["cut_after"] == 2 * 256 // 32
    assert (
        "ended after 16 of 60 updates: give it more epochs, or use --updates 16" in report["reason"]
    )
    assert not (tmp_path / "evaluated").exists()


@pytest.mark.parametrize("protocol", ["local-sgd:3", "post-local-sgd:3,3"])
def test_all_local_steps_of_an_update_use_its_rate(say: Say, tmp_path: Path, protocol: str) -> None:
    """Eight batches per pass make one round of three steps each, and one of a single step."""
    (tmp_path / "train.py").write_text(SCRIPT)
    line = f"tune lr train.py --workers 2 --protocol {protocol} --lowest 1e-4 --highest 0.1"
    code, out, err = say(f"{line} --updates 12 --device cpu --json -- 1000")
    assert code == 0, err
    ramp = LrRamp(spec="train.py", lowest=1e-4, highest=0.1, updates=12)
    assert json.loads(out)["rates"] == [ramp.rate(version) for version in range(12)]
    for worker in (0, 1):
        lines = (tmp_path / f"rates{worker}").read_text().splitlines()
        assert len(lines) > 12
        for version, rate in (line.split() for line in lines):
            assert float(rate) == pytest.approx(ramp.rate(int(version)))


@pytest.mark.parametrize(
    ("change", "flags", "words"),
    [
        (("", ""), "--batch-size 8", "are for tasks"),
        (("import paceline", ""), "", "paceline"),
        (("lr=0.01", "lr=0.0"), "", "learning rate, which must be > 0"),
        (
            ("optimizer.step()", "optimizer.step(); optimizer.param_groups[0]['lr'] = 0.3"), "",
            "tune lr sets the learning rate of each update",
        ),
        (
            ("prepare(model, optimizer,",
             "prepare(torch.optim.lr_scheduler.StepLR(optimizer, 3), model, optimizer,"), "",
            "but so does StepLR",
        ),
        (
            ("model, optimizer, loader = pace",
             "scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)\n"
             "model, optimizer, loader = pace"), "",
            "but so does LinearLR",
        ),
    ],
    ids=["flags", "lines", "rate", "by hand", "scheduler", "scheduler beside"],
)  # fmt: skip
def test_untestable_script_gets_a_short_error(
    say: Say, tmp_path: Path, change: tuple[str, str], flags: str, words: str
) -> None:
    text = SCRIPT.replace(*change) if change[0] else SCRIPT
    (tmp_path / "train.py").write_text(text)
    code, _, err = say(f"tune lr train.py {flags} --device cpu -- 1")
    assert code != 0
    assert words in err
    assert "Traceback" not in err


def test_tune_lr_reports_and_plots(say: Say, tmp_path: Path) -> None:
    line = "tune lr quadratic --updates 30 --lowest 1e-3 --mini-batch-size 8 --workers 2"
    code, out, err = say(f"{line} --plot rates.svg --json")
    assert code == 0, err
    report = json.loads(out)
    assert report["samples_per_update"] == 16
    ElementTree.parse(tmp_path / "rates.svg")
    page = (Path(__file__).parents[2] / "docs" / "json.md").read_text()
    section = page.split("## `paceline tune lr`")[1].split("\n## ")[0]
    for field in report:
        assert f"`{field}`" in section, field


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("quadratic --lowest 1 --highest 0.1", "0 < lowest < highest"),
        ("quadratic --updates 3", "--updates must be >= 10"),
        ("quadratic --batch-size 8 --mini-batch-size 4", "exclude each other"),
        ("quadratic --batch-size 0", "must be >= 1"),
        ("quadratic --workers 2 --mini-batch-size 0", "--mini-batch-size must be >= 1, got 0"),
        ("quadratik", "did you mean 'quadratic'"),
        ("quadratic --plot nowhere/rates.svg", "nowhere is not a folder"),
        ("quadratic --protocol k-sync:3", "number of workers"),
        ("nowhere.py", "there is no script nowhere.py; name a file, or a task"),
        ("quadratic -- 3", "quadratic is a task, but 3 is for a script"),
    ],
)
def test_invalid_input_gets_a_one_line_error(say: Say, flags: str, words: str) -> None:
    code, _, err = say(f"tune lr {flags}")
    assert code == 2
    assert words in err.splitlines()[-1]


def test_error_says_when_the_first_rate_is_too_high() -> None:
    ramp = LrRamp(spec="quadratic", lowest=1e30, highest=1e33, updates=20)
    with pytest.raises(ConfigError, match="begin lower"):
        measure_range(LrQuestion(ramp=ramp, device="cpu"))


def test_missing_script_is_named(tmp_path: Path) -> None:
    ramp = LrRamp(spec=str(tmp_path / "none.py"), lowest=1e-4, highest=1.0, updates=10)
    with pytest.raises(ConfigError, match=r"there is no script .*none\.py"):
        script_program(ramp, [])
