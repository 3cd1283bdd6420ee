"""A scheduler is stepped once per counted update, whichever member calls it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from paceline.errors import ConfigError
from paceline.exchange.solo import SoloExchange
from paceline.script.member_state import adopt, settings_text
from paceline.script.place import LoopPlace
from paceline.script.schedules import LocalSchedule, Schedule, Schedules
from paceline.script.shared_schedule import SharedSchedule
from runs import run_script


class Words:
    """Words that all members see, here without shared memory."""

    rhythm = count = end = 0
    argument = float("nan")


class Member:
    """One member's scheduler, optimizer and exchange."""

    def __init__(self, words: Any = None, *, is_lockstep: bool = True) -> None:
        self.optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        self.scheduler = StepLR(self.optimizer, 1, gamma=0.5)
        self.exchange = SoloExchange()
        self.place = place = LoopPlace(
            self.exchange, lambda: True, is_lockstep=is_lockstep, is_local=False
        )
        schedule: Schedule = (
            LocalSchedule(self.scheduler, place, self.tell)
            if words is None
            else SharedSchedule(self.scheduler, place, self.tell, words)
        )
        self.num_told = 0
        self.schedules = Schedules(
            [schedule], [self.optimizer], place, self.tell, is_alone=False, skips=True
        )
        self.schedules.open()
        self.schedules.opened()

    def tell(self) -> None:
        self.num_told += 1

    def step(self, *, is_skipped: bool = False) -> None:
        """A step of its optimizer."""
        self.optimizer.step()
        self.schedules.begin_step(self.exchange.version, found_inf=False, has_scaled=False)
        self.exchange.skip() if is_skipped else self.exchange.push()
        self.schedules.end_step()

    @property
    def rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize("words", [None, Words])
def test_a_skipped_update_does_not_step_the_scheduler(words: Any) -> None:
    member = Member(words and words())
    rates = []
    for is_skipped in (False, False, True, False):
        member.step(is_skipped=is_skipped)
        member.scheduler.step()
        rates.append(member.rate)
    assert rates == [0.5, 0.25, 0.25, 0.125]


def test_an_absent_member_takes_the_steps_that_others_recorded() -> None:
    words = Words()
    first, second = Member(words, is_lockstep=False), Member(words, is_lockstep=False)
    first.step()
    first.scheduler.step()
    second.exchange.push()  # it pulled that version
    second.schedules.advance(1)
    assert (first.rate, second.rate) == (0.5, 0.5)


def test_another_rhythm_is_refused_without_lockstep() -> None:
    member = Member(Words(), is_lockstep=False)
    member.step()
    member.scheduler.step()
    with pytest.raises(ConfigError, match="worker 0 steps StepLR more than once after one"):
        member.scheduler.step()


def test_a_late_member_starts_at_the_others_scheduler_step() -> None:
    words = Words()
    first = Member(words)
    first.step()
    first.scheduler.step()
    later = Member(words)
    adopt(settings_text(first.optimizer, first.schedules), later.optimizer, later.schedules)
    assert later.rate == 0.5
    assert later.scheduler.last_epoch == first.scheduler.last_epoch
    assert later.schedules.marks()[0][0] == first.schedules.marks()[0][0] == 1


def test_the_scheduler_state_is_that_of_plain_torch() -> None:
    member = Member()
    plain = StepLR(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0), 1, gamma=0.5)
    assert member.scheduler.state_dict().keys() == plain.state_dict().keys()


LATE = """
import time
import torch, paceline
from torch.utils.data import DataLoader, TensorDataset

pace = paceline.connect()
model = torch.nn.Sequential(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
loader = DataLoader(TensorDataset(torch.ones(32, 2)), batch_size=8)
model, optimizer, loader, scheduler = pace.prepare(model, optimizer, loader, scheduler)
is_first = True
for epoch in pace.epochs(2):
    for (inputs,) in loader:
        with pace.step():
            if is_first and pace.worker == 1:
                time.sleep(0.4)  # its work is another's by now
            optimizer.zero_grad()
            model(inputs).mean().backward()
            optimizer.step()
        if is_first and pace.worker == 0:
            time.sleep(0.8)  # the other one's scheduler is stepped first
        is_first = False
        scheduler.step()
    with open(f"rates-{pace.worker}.txt", "a") as file:
        print(optimizer.param_groups[0]["lr"], file=file)
"""


def test_missed_steps_are_not_taken_for_a_rhythm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "late.py").write_text(LATE)
    run_script(tmp_path / "late.py", tmp_path, workers=2, protocol="k-sync:1")
    for worker in range(2):
        rates = [float(word) for word in (tmp_path / f"rates-{worker}.txt").read_text().split()]
        assert rates == pytest.approx([0.3 * 0.5**4, 0.3 * 0.5**8])
