"""A member's own changes, step by step, without another member."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.exchange.own_changes import OwnChanges
from paceline.store.layout import lay_out


class Copy:
    """A model of three parameters, each a fragment: ``base`` is 10, 20, 30, its own 1, 2, 3."""

    def __init__(self, num_fragments: int = 3, overlap_steps: int = 0) -> None:
        named = [(str(one), nn.Parameter(torch.zeros(1))) for one in range(3)]
        self.replica = SimpleNamespace(layout=lay_out(named, [], []))
        self.places = self.replica.layout.parameters.places
        size = self.replica.layout.parameters.stop
        self.home, self.base = (torch.zeros(size, dtype=torch.uint8) for _ in range(2))
        self.num_marked, self.version = 0, 0
        self.unedited = SimpleNamespace(mark=self._mark)
        for number, place in enumerate(self.places, start=1):
            place.view(self.home).fill_(float(number))
            place.view(self.base).fill_(10.0 * number)
        self.own = OwnChanges(self, num_fragments, overlap_steps)  # type: ignore[arg-type]

    def _mark(self) -> None:
        self.num_marked += 1

    def held(self, block: Tensor | None = None) -> list[float]:
        block = self.home if block is None else block
        return [float(place.view(block)) for place in self.places]

    def push(self, version: int, *, is_last: bool = False) -> None:
        self.version = version
        self.own.turn_to(version, is_last=is_last)
        self.own.merge()
        self.own.hand_in()

    def pull(self, version: int) -> None:
        before, self.version = self.version, version
        self.own.take(before, version)


@pytest.mark.parametrize(("version", "held"), [(0, [10, 2, 3]), (4, [1, 20, 3]), (5, [1, 2, 30])])
def test_only_the_due_fragment_is_taken_over(version: int, held: list[float]) -> None:
    copy = Copy()
    copy.push(version)
    copy.pull(version + 1)
    assert copy.held() == held


def test_a_member_without_a_push_takes_all() -> None:
    copy = Copy()
    copy.pull(1)
    assert copy.held() == [10, 20, 30]


def test_a_member_that_missed_updates_takes_their_fragments() -> None:
    copy = Copy()
    copy.push(0)
    copy.pull(2)  # of 0, its own, and of 1
    assert copy.held() == [10, 20, 3]
    copy = Copy()
    copy.push(1)
    copy.pull(9)
    assert copy.held() == [10, 20, 30]


def test_a_member_that_repeats_an_update_restarts_from_the_base() -> None:
    """Its first push contains its changes."""
    for overlap in (0, 2):
        copy = Copy(overlap_steps=overlap)
        copy.push(1)
        copy.pull(1)
        assert copy.held() == [1, 20, 3]


def test_the_last_update_of_an_epoch_leaves_no_own_changes() -> None:
    for overlap in (0, 2):
        copy = Copy(overlap_steps=overlap)
        copy.push(1, is_last=True)
        copy.pull(2)
        assert copy.held() == [10, 20, 30]
        assert copy.own.remember() == {}


def test_returned_work_drops_all_own_changes() -> None:
    copy = Copy()
    copy.push(0)
    copy.own.forget()
    copy.pull(0)
    assert copy.held() == [10, 20, 30]


@pytest.mark.parametrize("overlap", [1, 3])
def test_own_changes_are_merged_in_halves_after_the_overlap_steps(overlap: int) -> None:
    copy, halfway, merges = Copy(overlap_steps=overlap), list[int](), list[int]()
    copy.own.before_merge = lambda: merges.append(1)
    copy.own.halfway = lambda: halfway.append(1)
    copy.push(1)
    copy.pull(2)
    for _ in range(overlap):
        assert copy.held() == [1, 2, 3]
        copy.own.stepped()
    assert copy.held() == [1, 11, 3]
    assert (len(merges), len(halfway), copy.num_marked) == (1, overlap // 2, 1)
    copy.own.stepped()
    assert copy.held() == [1, 11, 3], "merged twice"


def test_with_too_few_steps_changes_are_merged_before_the_next_push() -> None:
    copy = Copy(overlap_steps=3)
    copy.push(1)
    copy.pull(2)
    copy.push(2)
    assert copy.held() == [1, 11, 3]


@pytest.mark.parametrize("overlap", [0, 2])
@pytest.mark.parametrize("has_pulled", [False, True])
def test_resumed_own_changes_equal_the_saved_ones(overlap: int, has_pulled: bool) -> None:
    """Through the store it is taken after the push, between peers when the update is complete."""

    def finish(resumed: Copy) -> list[float]:
        if not has_pulled:
            resumed.pull(5)
        resumed.own.stepped()
        resumed.own.stepped()
        resumed.push(5)
        return resumed.held()

    copy, other = Copy(overlap_steps=overlap), Copy(overlap_steps=overlap)
    copy.push(4)
    if has_pulled:
        copy.pull(5)
    saved: dict[str, Any] = copy.own.remember()
    other.pull(5)
    assert other.held() == [10, 20, 30]
    other.own.go_on(saved)
    assert finish(other) == finish(copy)


def test_a_single_fragment_saves_no_own_changes() -> None:
    copy = Copy(num_fragments=1)
    copy.push(0)
    assert copy.own.remember() == {}
    copy.pull(1)
    assert copy.held() == [10, 20, 30]
