"""A script's steps under observation: what is said of it, and of one that cannot be observed."""

import os
import select
from pathlib import Path
from typing import Any

import pytest

from forked import Forked
from paceline.doctor.observed import launching, pairs
from paceline.doctor.observed.clock import PartsClock
from paceline.doctor.observed.launching import ScriptRun, observe
from paceline.doctor.observed.lines import render_observation
from paceline.doctor.observed.observation import INPUT, PriceOutcome, Regime
from paceline.errors import ConfigError

HEAD = """\
import sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
torch.set_num_threads(1)
class Slept(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, i):
        time.sleep({decode_s})
        return torch.ones(16), i % 4
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(Slept(), batch_size=8, shuffle=True, num_workers={workers})
"""
LOOP = """\
for epoch in range(10_000):
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
"""


@pytest.fixture(autouse=True)
def _forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script's process is forked from one that has torch."""

    def begin(command: list[str], **given: Any) -> Forked:
        del given["stdin"]
        return Forked(command[1:], **given)

    monkeypatch.setattr(launching, "Popen", begin)


def script(folder: Path, text: str = HEAD + LOOP, decode_s: float = 0.0, workers: int = 0) -> Path:
    path = folder / "train.py"
    path.write_text(text.replace("{decode_s}", f"{decode_s}").replace("{workers}", f"{workers}"))
    return path


# -- pure ----------------------------------------------------------------------------------------


def test_parts_exclude_one_another_and_sum_to_the_time_that_any_is_open() -> None:
    clock = PartsClock()
    clock.begin("forward", 1.0)
    clock.begin("wait", 2.0)
    clock.end(3.0)
    clock.end(4.5)
    clock.begin("optimizer", 5.0)
    assert clock.taken(6.0) == {"forward": 2.5, "wait": 1.0, "optimizer": 1.0}
    clock.end(7.0)
    assert clock.taken(9.0) == {"optimizer": 1.0}


def compared(ratios: list[float]) -> tuple[pairs.Pairs, int]:
    found = pairs.Pairs()
    for number, ratio in enumerate(ratios, 1):
        found.add(1.0, ratio)
        if found.is_done():
            return found, number
    return found, len(ratios)


def test_pairs_stop_early_where_the_interval_excludes_two_per_cent() -> None:
    found, number = compared([0.80, 0.81, 0.79, 0.80, 0.80])
    assert (found.outcome(), number) == (PriceOutcome.WORTH, 3)
    assert found.saved().low < 0.2 < found.saved().high
    found, number = compared([1.0, 1.001, 0.999, 1.0])
    assert (found.outcome(), number) == (PriceOutcome.NOTHING, 3)


def test_noise_is_not_called_a_gain() -> None:
    found, number = compared([0.7, 1.3] * 12)
    assert (found.outcome(), number) == (PriceOutcome.UNKNOWN, pairs.MOST_PAIRS)


# -- scripts -------------------------------------------------------------------------------------


def test_workers_are_predicted_within_a_tenth_of_what_they_bring(tmp_path: Path) -> None:
    seen = observe(
        ScriptRun(script=script(tmp_path, decode_s=0.002), price_s=30.0, only="num_workers")
    )
    assert seen.regime is Regime.INPUT
    assert sum(seen.parts.values()) == pytest.approx(seen.observed_s, rel=1e-6)
    assert seen.parts[INPUT] > 8 * 0.002
    assert seen.share(INPUT) > 0.7
    assert seen.slow_down < 3.0
    (price,) = [one for one in seen.prices if one.name.startswith("num_workers")]
    assert price.outcome is PriceOutcome.WORTH
    assert (Path(price.file).name, price.line) == ("train.py", 15)
    workers = int(price.name.partition("=")[2])
    real = observe(ScriptRun(script=script(tmp_path, decode_s=0.002, workers=workers), price_s=0.0))
    assert price.saved == pytest.approx(1 - real.step_s / seen.step_s, abs=0.1)
    said = "\n".join(render_observation("train.py", seen))
    assert "train.py: input bound" in said
    assert f"train.py:15  num_workers={workers} in the DataLoader" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import torch\nimport sys\nsys.exit('train.py: error: give --data')\n",
         "exit code 1 before a training step, and says: 'train.py: error: give --data'"),
        ("import torch\nraise ValueError('no data')\n",
         r"fails before a training step: ValueError: no data \(.*train.py:2\)"),
        ("import torch\nprint('done')\n", "ends before enough steps of an optimizer"),
        ("import os, torch\nos.kill(os.getpid(), 9)\n", "was ended by signal 9"),
        ("import time, torch\ntime.sleep(100)\n", "made no step of an optimizer of torch in 1 s"),
    ],
    ids=["arguments", "failing", "early", "killed", "for-ever"],
)  # fmt: skip
def test_what_cannot_be_observed_is_told_in_one_sentence(
    text: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said) as found:
        observe(ScriptRun(script=script(tmp_path, text), first_s=1.0 if "time" in text else 60.0))
    assert "\n" not in str(found.value)


def test_what_a_script_begins_is_ended_with_it(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    held = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    text = f"import os, time, torch\nos.open({str(pipe)!r}, os.O_WRONLY)\n"
    text += "if not os.fork():\n    time.sleep(100)\n"
    with pytest.raises(ConfigError, match="processes that it begins"):
        observe(ScriptRun(script=script(tmp_path, text)))
    assert select.select([held], [], [], 20.0)[0], "who holds the other end is still there"
    assert os.read(held, 1) == b""
    os.close(held)
