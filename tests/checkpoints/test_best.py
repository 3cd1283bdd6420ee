"""The best models that are kept: which, in which files, whichever worker evaluates."""

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader, TensorDataset

from paceline.checkpoints.best import BestModels
from paceline.context import Context
from paceline.errors import ConfigError
from paceline.exchange.solo import SoloExchange
from paceline.script.worker import Pace
from paceline.system.files import OpenFolder

Say = Callable[[str], tuple[int, str, str]]
Launch = Callable[..., tuple[int, str, str]]


def _models(folder: Path, **flags: object) -> BestModels:
    now = folder.stat()
    return BestModels(folder, (now.st_dev, now.st_ino), "acc", **flags)  # type: ignore[arg-type]


def _look(models: BestModels, *rows: tuple[int, float]) -> None:
    for version, value in rows:
        models.look({"acc": (value * 4, 4)}, version, f"{version}".encode)


def _listed(folder: Path) -> list[int]:
    rows = json.loads((folder / "best.json").read_text())["models"]
    return [row["version"] for row in rows]


def test_only_the_best_model_is_kept(tmp_path: Path) -> None:
    _look(_models(tmp_path), (1, 0.5), (2, 0.7), (3, 0.6), (4, 0.7))
    assert sorted(os.listdir(tmp_path)) == ["best.json", "best.safetensors"]
    assert (tmp_path / "best.safetensors").read_text() == "2"


def test_as_many_models_are_kept_as_requested(tmp_path: Path) -> None:
    _look(_models(tmp_path, most=2), (1, 0.5), (2, 0.7), (3, 0.6), (4, 0.9), (5, 0.1))
    assert _listed(tmp_path) == [4, 2]
    assert (tmp_path / "best.safetensors").read_text() == "4"
    assert sorted(path.name for path in tmp_path.glob("best-*")) == [
        "best-2.safetensors", "best-4.safetensors",
    ]  # fmt: skip


def test_several_workers_keep_the_best_of_all(tmp_path: Path) -> None:
    first, second = _models(tmp_path), _models(tmp_path)
    _look(first, (1, 0.9))
    _look(second, (2, 0.5), (1, 0.9))
    assert (_listed(tmp_path), (tmp_path / "best.safetensors").read_text()) == ([1], "1")
    _look(second, (3, 1.0))
    _look(first, (4, 0.95))
    assert _listed(tmp_path) == [3]


@pytest.mark.parametrize("most", [1, 2])
def test_the_best_local_weights_of_a_version_are_kept(most: int, tmp_path: Path) -> None:
    models = _models(tmp_path, most=most)
    models.look({"acc": (2.0, 4)}, 0, lambda: b"after one local step")
    models.look({"acc": (3.0, 4)}, 0, lambda: b"after two")
    models.look({"acc": (1.0, 4)}, 0, lambda: b"after three")
    assert _listed(tmp_path) == [0]
    assert (tmp_path / "best.safetensors").read_bytes() == b"after two"


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("most", [1, 2])
def test_a_kill_while_a_model_is_kept_never_leaves_a_worse_one(
    most: int, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _look(_models(tmp_path, most=most), (1, 0.5))
    replace, calls = OpenFolder.replace, iter(range(number))

    def killed(place: OpenFolder, *arguments: Any, **options: Any) -> None:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        replace(place, *arguments, **options)

    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(OpenFolder, "replace", killed)
        _look(_models(tmp_path, most=most), (2, 0.9))
    best = (tmp_path / "best.safetensors").read_text()
    _look(_models(tmp_path, most=most), (3, 0.7))
    assert (tmp_path / "best.safetensors").read_text() == ("2" if best == "2" else "3")
    assert _listed(tmp_path) == {"1": [3, 1], "2": [2, 3]}[best][:most]
    _look(_models(tmp_path, most=most), (2, 0.9))  # where the run resumes from before it
    assert (tmp_path / "best.safetensors").read_text() == "2"


def test_non_finite_and_unmeasured_values_are_not_kept(tmp_path: Path) -> None:
    models = _models(tmp_path)
    models.look({"acc": (float("nan"), 4)}, 1, bytes)
    models.look({"loss": (1.0, 4)}, 1, bytes)
    assert os.listdir(tmp_path) == []


def test_a_metric_with_an_ambiguous_name_needs_a_mode(tmp_path: Path) -> None:
    now = tmp_path.stat()
    identity = now.st_dev, now.st_ino
    with pytest.raises(ConfigError, match="'margin' does not tell whether more of it is better"):
        BestModels(tmp_path, identity, "margin")
    models = BestModels(tmp_path, identity, "margin", mode="min")
    for version, value in ((1, 0.5), (2, 0.3)):
        models.look({"margin": (value, 1)}, version, bytes)
    assert _listed(tmp_path) == [2]


def test_models_of_another_metric_are_not_compared(tmp_path: Path) -> None:
    _look(_models(tmp_path), (1, 0.9))
    now = tmp_path.stat()
    other = BestModels(tmp_path, (now.st_dev, now.st_ino), "loss")
    with pytest.raises(ConfigError, match=r"best models by 'acc', but this run keeps them by 'los"):
        other.look({"loss": (0.3, 1)}, 2, bytes)


def test_a_damaged_list_is_named(tmp_path: Path) -> None:
    (tmp_path / "best.json").write_text('{"models": [{"version": -1, "worth": 1.0}]}')
    with pytest.raises(ConfigError, match=r"best\.json is damaged .* move it away"):
        _look(_models(tmp_path), (1, 0.5))


SCRIPT = """\
import torch, paceline

pace = paceline.connect()
model = torch.nn.Linear(2, 1, bias=False)
torch.nn.init.zeros_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
data = torch.utils.data.DataLoader(torch.ones(8, 2), batch_size=4)
model, optimizer = pace.prepare(model, optimizer)
{asked}
for number in pace.updates(40):
    with pace.step():
        optimizer.zero_grad()
        model(torch.ones(2, 2)).mean().backward()  # each update takes 1 from each weight
        optimizer.step()
    if number % 5 == 4:
        worth = 1 / (1 + abs(21 + float(model.weight.detach()[0, 0])))  # best at version 21
        pace.evaluate(lambda batch: {{"f1": (worth * len(batch), len(batch))}}, data)
        pace.log({{"number": number}})
        pace.save("last.safetensors")
"""


@pytest.fixture
def launch(say: Say, tmp_path: Path) -> Launch:
    def run(flags: str, rules: str) -> tuple[int, str, str]:
        (tmp_path / "train.py").write_text(SCRIPT.format(asked=rules))
        return say(f"launch --device cpu --run-dir run {flags} train.py")

    return run


@pytest.mark.parametrize("flags", ["--workers 1", "--workers 3 --protocol async"])
def test_every_worker_evaluates_logs_and_saves_in_a_loop_over_numbers(
    flags: str, launch: Launch, tmp_path: Path
) -> None:
    code, out, err = launch(flags, 'pace.keep_best("f1", most=2)')
    assert code == 0, err
    run = tmp_path / "run"
    lines = [json.loads(line) for line in (run / "trace.jsonl").read_text().splitlines()]
    logged = {line["values"]["number"] for line in lines if line["kind"] == "log"}
    assert logged == set(range(4, 40, 5))
    measured = {
        line["version"]: line["totals"]["f1"][0] for line in lines if line["kind"] == "evaluated"
    }
    assert measured
    assert f"update {max(measured)}: test f1" in out
    assert (run / "last.safetensors").is_file()
    best = json.loads((run / "best.json").read_text())["models"]
    assert len(best) == 2
    assert best[0]["worth"] >= max(measured.values()) / 8 - 1e-6
    weights = load_file(run / "best.safetensors")["weight"]
    assert float(weights[0, 0]) == -best[0]["version"]


@pytest.mark.parametrize("flags", ["--workers 1", "--workers 2 --protocol full-sync"])
def test_a_run_ends_when_a_metric_stops_improving(flags: str, launch: Launch) -> None:
    code, out, err = launch(flags, 'pace.stop_when("f1", patience=1)')
    assert code == 0, err
    assert "f1 was no better than" in out
    assert "once" in out


def test_a_rule_for_an_unmeasured_metric_is_named_at_the_end(launch: Launch) -> None:
    code, out, _ = launch("--workers 1", 'pace.stop_when("acc", above=0.9)')
    assert code == 0
    assert "pace.stop_when('acc') did nothing: no pace.evaluate measured that" in out


def test_a_lone_worker_stops_and_keeps_by_the_same_rules(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pace = Pace(SoloExchange(), Context())
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=8)
    model, optimizer, loader = pace.prepare(model, optimizer, data)
    pace.keep_best("acc")
    pace.stop_when("acc", patience=2)
    pace.stop_when("f1", above=0.9)
    worth, seen = iter([0.1, 0.9, 0.5, 0.2, 1.0]), []
    for _ in pace.epochs(5):
        for (x,) in loader:
            with pace.step():
                optimizer.zero_grad()
                model(x).mean().backward()
                optimizer.step()
        seen.append(model.weight.detach().clone())
        value = next(worth)
        pace.evaluate(lambda batch, value=value: {"acc": (value * 8, 8)}, data)
    assert len(seen) == 4
    assert torch.equal(load_file("best.safetensors")["weight"], seen[1])
    assert "pace.stop_when('f1') did nothing" in capsys.readouterr().out


def test_a_resumed_run_counts_earlier_evaluations(launch: Launch, say: Say, tmp_path: Path) -> None:
    rules = 'pace.stop_when("f1", patience=3)'
    code, out, err = launch("--workers 1 --updates 31", rules)
    assert code == 0, err
    assert "ended             31 updates" in out  # evaluated at 25 and 30: no better than at 20
    code, out, err = say("launch --device cpu --resume run train.py")
    assert code == 0, err
    assert "f1 was no better than 0.5 3 times in a row" in out
