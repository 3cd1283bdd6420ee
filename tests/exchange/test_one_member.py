"""One member, and a channel with a coordinator's messages: no process, no thread, no clock."""

import math
import time
from collections import deque
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from paceline.errors import ConfigError, WorkerError
from paceline.events import Grant, Lease, Ticket
from paceline.exchange import make_averaging
from paceline.exchange.base import Shape, Stopped, Superseded, Work
from paceline.exchange.distributed import DistributedAveraging
from paceline.exchange.member import MemoryCarrier
from paceline.exchange.model_copy import ModelCopy
from paceline.exchange.through_store import StoreExchange
from paceline.exchange.turns import Turns
from paceline.passes import START
from paceline.replica.replica import Replica
from paceline.store.clip import UNCLIPPED
from paceline.store.control import ALARM, Control, control_bytes
from paceline.store.memory import PrivateMemory
from paceline.store.parameter_store import arena_bytes
from paceline.wire import messages

LEASES = [Lease(number, 0, 2 * number, 2 * number + 2) for number in range(4)]
PATHS = pytest.mark.parametrize("path", ["store", "peers"])


class ToldChannel:
    """The messages that the member will receive, in order, and those that it sent."""

    def __init__(self) -> None:
        self.to_come: deque[Any] = deque()
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)

    hold = send

    def receive(self, is_blocking: bool = True) -> list[Any]:
        if not is_blocking:
            return []
        assert self.to_come, "it waits for ever"
        message = self.to_come.popleft()
        return [message, self.to_come.popleft()] if isinstance(message, messages.Job) else [message]

    def last(self, kind: type) -> Any:
        return next(message for message in reversed(self.sent) if isinstance(message, kind))


class Rig:
    """A member with a linear model, and the same model alone."""

    def __init__(self, *, nonfinite_is_error: bool = True) -> None:
        torch.manual_seed(3)
        self.model, self.alone = nn.Linear(3, 2), nn.Linear(3, 2)
        self.alone.load_state_dict(self.model.state_dict())
        self.optimizer, self.its = (
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
            for model in (self.model, self.alone)
        )
        replica = Replica(self.model, self.optimizer, self.optimizer)
        self.control = Control(PrivateMemory(control_bytes(1)), 1)
        size = arena_bytes(replica.layout, 1, pins=True)
        self.channel, carrier = ToldChannel(), MemoryCarrier(self.control, PrivateMemory(size))
        self.member = StoreExchange(
            self.channel, carrier, seat=0, member=0,
            averaging=partial(make_averaging, "peers", ""),
        )  # fmt: skip
        self.member.place = lambda: START
        self.channel.to_come.append(messages.Laid(
            size, 1, False, nonfinite_is_error, 0, 0.0, 0, START, "shared",
        ))  # fmt: skip
        shape = Shape(num_samples=8, batch_size=2, parts=1, keep_remainder=True)
        self.member.attach(replica, self.optimizer, shape, {})

    def open(self, path: str) -> None:
        self.path = path
        opened = messages.OpenEpoch(0, path == "peers", -1, 0, (0,), 0.0)
        self.channel.to_come += [opened] if path == "peers" else [opened, self.grant(0)]
        assert self.member.open_epoch(0, None)

    def grant(self, number: int) -> Grant:
        return Grant(Ticket(0, number, number), (LEASES[number],))

    def step(self, value: float = 1.0) -> None:
        """Push a gradient of this value; through the store the member gets the job to finish it."""
        version = self.member.version
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, value)
        if self.path == "store":
            finish = messages.Finish(version + 1, version + 1, 0, 1.0, UNCLIPPED)
            self.channel.to_come += [finish, self.grant(version + 1)]
        self.member.push(Work(num_samples=2, weight=2.0, loss=value))

    def step_alone(self, value: float = 1.0) -> None:
        for parameter in self.alone.parameters():
            parameter.grad = torch.full_like(parameter, value)
        self.its.step()

    def is_as_alone(self) -> bool:
        pairs = zip(self.model.parameters(), self.alone.parameters(), strict=True)
        return all(torch.equal(value, other) for value, other in pairs)


@PATHS
def test_a_member_matches_the_optimizer_alone(path: str) -> None:
    rig = Rig()
    rig.open(path)
    for value in (1.0, -0.5, 0.25):
        assert rig.member.grant().leases == (LEASES[rig.member.version],)
        rig.step(value)
        rig.step_alone(value)
        assert rig.is_as_alone()
    assert rig.member.version == rig.control.version == 3
    assert rig.member.applied(3) == 3


def test_an_epoch_between_peers_ends_with_reported_rounds() -> None:
    rig = Rig()
    rig.open("peers")
    rig.channel.to_come.append(messages.EndEpoch(0, 4))
    for _ in LEASES:
        rig.step()
    assert rig.member.grant() is None
    told = [
        row
        for message in rig.channel.sent
        if isinstance(message, messages.Rounds)
        for row in message.rows
    ]
    assert [row.entries[0].num_samples for row in told] == [2, 2, 2, 2]
    rig.channel.to_come += [messages.OpenEpoch(1, False, -1, 4, (0,), 0.0), rig.grant(3)]
    assert rig.member.open_epoch(1, None)
    for _ in LEASES:
        rig.step_alone()
    assert rig.is_as_alone()


@PATHS
def test_a_non_finite_gradient_is_refused_by_name(path: str) -> None:
    rig = Rig()
    rig.open(path)
    with pytest.raises(WorkerError, match=r"worker 0: the gradient of 'weight' is not finite"):
        rig.step(math.nan)


def test_a_skipped_non_finite_gradient_changes_nothing() -> None:
    rig = Rig(nonfinite_is_error=False)
    rig.open("peers")
    rig.step(math.inf)
    assert rig.is_as_alone()
    assert (rig.member.version, rig.member.applied(1)) == (1, 0)


def test_a_request_that_peers_cannot_serve_uses_the_store() -> None:
    rig = Rig()
    rig.open("peers")
    rig.step()
    rig.channel.to_come += [messages.Resume(7), messages.Extended(LEASES[2])]
    assert rig.member.extend() == LEASES[2]
    assert rig.control[ALARM] == 1
    assert rig.channel.last(messages.PeersLeft) == messages.PeersLeft(None, (), True)
    assert rig.channel.last(messages.Extend).serial == 7
    rig.step_alone()
    assert rig.is_as_alone()


def test_a_collective_refuses_what_it_cannot_serve() -> None:
    with pytest.raises(ConfigError, match=r"step.skip\(\) is not supported on path 'collective'"):
        object.__new__(DistributedAveraging).refuse("step.skip()")


def test_work_is_called_off_inside_a_step_only() -> None:
    rig = Rig()
    rig.open("store")
    rig.control[rig.control.cancelled[0]] = 1
    rig.member.check()
    rig.member.is_in_step = rig.member.has_pushed = True
    rig.member.check()  # what it was for is handed in
    rig.member.has_pushed = False
    with pytest.raises(Superseded):
        rig.member.check()
    before = rig.member.serial
    rig.channel.to_come.append(rig.grant(1)._replace(ticket=Ticket(0, 1, 0)))
    rig.member.superseded()
    assert rig.channel.last(messages.StepLeft).serial == 0
    assert rig.member.serial == before + 2
    rig.member.check()


def test_a_simulated_delay_ends_when_work_is_called_off() -> None:
    rig = Rig()
    rig.open("store")
    rig.control[rig.control.cancelled[0]] = 1
    with pytest.raises(Superseded):
        rig.member.sleep(60.0)
    rig.member.hooks.spread = object()  # type: ignore[assignment]
    start_s = time.perf_counter()
    rig.member.sleep(60.0)  # of a split model nobody leaves a step alone
    assert time.perf_counter() - start_s < 30.0


@pytest.mark.parametrize("overlap_steps", [0, 2])
def test_skipping_is_advised_only_where_it_is_allowed(overlap_steps: int) -> None:
    averaging = object.__new__(DistributedAveraging)
    averaging._seat = 1
    averaging._bad_name = lambda: "weight"  # type: ignore[method-assign]
    averaging._copy = SimpleNamespace(  # type: ignore[assignment]
        own=SimpleNamespace(overlap_steps=overlap_steps), version=7
    )
    with pytest.raises(WorkerError, match=r"'weight' is not finite at version 7") as caught:
        averaging._refuse_not_finite()
    assert ("--nonfinite skip" in str(caught.value)) == (not overlap_steps)


@pytest.mark.parametrize(
    ("collective", "overlap_steps", "can_skip"),
    [("native", 0, True), ("native", 2, False), ("shared", 2, True), ("", 2, True)],
)
def test_a_refused_push_advises_skipping_only_where_it_is_allowed(
    collective: str, overlap_steps: int, can_skip: bool
) -> None:
    member = Rig().member
    layout = messages.Laid(
        0, 1, False, True, 0, 0.0, 0, START, collective, overlap_steps=overlap_steps
    )
    own = member._own.copy
    copy = ModelCopy(0, own.replica, own.rule, own.store, layout, member.hooks, lambda: None)
    own.store.not_finite = lambda seat: "weight"  # type: ignore[method-assign]  # of this store
    with pytest.raises(WorkerError, match="the gradient of 'weight' is not finite") as caught:
        copy.refuse_not_finite(1.0, 0)
    assert ("--nonfinite skip" in str(caught.value)) == can_skip


def test_a_stop_while_waiting_for_work_ends_the_epoch() -> None:
    rig = Rig()
    rig.open("store")
    rig.channel.to_come.append(messages.Stop(0))
    rig.member.give_back()
    assert rig.member.grant() is None
    assert not rig.member.open_epoch(1, None)
    assert rig.member.is_cut_short


def test_jobs_are_done_before_the_message_after_them() -> None:
    rig = Rig()
    rig.open("store")
    rig.step()
    rig.step_alone()
    finish = messages.Finish(2, 2, 0, 1.0, UNCLIPPED)
    rig.channel.to_come += [finish, messages.Summed((5.0,))]
    assert rig.member.sum([2.0]) == [5.0]
    assert rig.control.version == 2


def test_the_main_member_enters_a_block_first() -> None:
    control = Control(PrivateMemory(control_bytes(2)), 2)
    first, other = (
        Turns(control, seat, lambda seat=seat: seat == 0, pytest.fail, pytest.fail)
        for seat in range(2)
    )
    with first.once() as is_first:
        assert is_first
    with other.once() as is_first:
        assert not is_first


def test_a_dismissed_newcomer_ends() -> None:
    rig = Rig()
    rig.channel.to_come.append(messages.SentAway())
    with pytest.raises(Stopped):
        rig.member.open_epoch(0, None)
