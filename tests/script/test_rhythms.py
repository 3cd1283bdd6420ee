"""A scheduler is stepped once an update that counted, whoever calls it."""

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


class Words:
    """What all members see, here without shared memory."""

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
        one: Schedule = (
            LocalSchedule(self.scheduler, place, self.tell)
            if words is None
            else SharedSchedule(self.scheduler, place, self.tell, words)
        )
        self.num_told = 0
        self.schedules = Schedules(
            [one], [self.optimizer], place, self.tell, is_alone=False, skips=True
        )
        self.schedules.open()
        self.schedules.opened()

    def tell(self) -> None:
        self.num_told += 1

    def step(self, *, is_skipped: bool = False) -> None:
        """One of its optimizer."""
        self.optimizer.step()
        self.schedules.begin_step(self.exchange.version, found_inf=False, has_scaled=False)
        self.exchange.skip() if is_skipped else self.exchange.push()
        self.schedules.end_step()

    @property
    def rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize("words", [None, Words])
def test_a_step_after_a_skipped_update_is_not_counted(words: Any) -> None:
    member = Member(words and words())
    rates = []
    for is_skipped in (False, False, True, False):
        member.step(is_skipped=is_skipped)
        member.scheduler.step()
        rates.append(member.rate)
    assert rates == [0.5, 0.25, 0.25, 0.125]


def test_who_took_no_part_takes_the_steps_that_others_noted() -> None:
    words = Words()
    first, second = Member(words, is_lockstep=False), Member(words, is_lockstep=False)
    first.step()
    first.scheduler.step()
    second.exchange.push()  # it pulled that version
    second.schedules.advance(1)
    assert (first.rate, second.rate) == (0.5, 0.5)


def test_another_rhythm_is_refused_where_members_are_not_in_step() -> None:
    member = Member(Words(), is_lockstep=False)
    member.step()
    member.scheduler.step()
    with pytest.raises(ConfigError, match="worker 0 steps StepLR more than once after one"):
        member.scheduler.step()


def test_a_member_that_comes_later_stands_where_the_others_do() -> None:
    words = Words()
    first = Member(words)
    first.step()
    first.scheduler.step()
    later = Member(words)
    adopt(settings_text(first.optimizer, first.schedules), later.optimizer, later.schedules)
    assert later.rate == 0.5
    assert later.scheduler.last_epoch == first.scheduler.last_epoch
    assert later.schedules.marks()[0][0] == first.schedules.marks()[0][0] == 1


def test_its_state_is_that_of_plain_torch() -> None:
    member = Member()
    plain = StepLR(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0), 1, gamma=0.5)
    assert member.scheduler.state_dict().keys() == plain.state_dict().keys()
