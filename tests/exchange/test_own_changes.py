"""What a member keeps of its own, step by step, without any other."""

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
def test_only_what_is_due_is_taken_over(version: int, held: list[float]) -> None:
    copy = Copy()
    copy.push(version)
    copy.pull(version + 1)
    assert copy.held() == held


def test_who_has_pushed_nothing_yet_takes_all() -> None:
    copy = Copy()
    copy.pull(1)
    assert copy.held() == [10, 20, 30]


def test_who_missed_updates_takes_what_they_were_of() -> None:
    copy = Copy()
    copy.push(0)
    copy.pull(2)  # of 0, its own, and of 1
    assert copy.held() == [10, 20, 3]
    copy = Copy()
    copy.push(1)
    copy.pull(9)
    assert copy.held() == [10, 20, 30]


def test_who_is_asked_again_for_one_update_begins_from_the_base() -> None:
    """Its first push has what it had changed."""
    for overlap in (0, 2):
        copy = Copy(overlap_steps=overlap)
        copy.push(1)
        copy.pull(1)
        assert copy.held() == [1, 20, 3]


def test_the_last_update_of_an_epoch_leaves_nothing_of_its_own() -> None:
    for overlap in (0, 2):
        copy = Copy(overlap_steps=overlap)
        copy.push(1, is_last=True)
        copy.pull(2)
        assert copy.held() == [10, 20, 30]
        assert copy.own.remember() == {}


def test_what_is_given_back_takes_all_along() -> None:
    copy = Copy()
    copy.push(0)
    copy.own.forget()
    copy.pull(0)
    assert copy.held() == [10, 20, 30]


@pytest.mark.parametrize("overlap", [1, 3])
def test_it_is_merged_by_halves_after_so_many_steps(overlap: int) -> None:
    copy, halfway, asked = Copy(overlap_steps=overlap), list[int](), list[int]()
    copy.own.before_merge = lambda: asked.append(1)
    copy.own.halfway = lambda: halfway.append(1)
    copy.push(1)
    copy.pull(2)
    for _ in range(overlap):
        assert copy.held() == [1, 2, 3]
        copy.own.stepped()
    assert copy.held() == [1, 11, 3]
    assert (len(asked), len(halfway), copy.num_marked) == (1, overlap // 2, 1)
    copy.own.stepped()
    assert copy.held() == [1, 11, 3], "merged twice"


def test_with_too_few_steps_it_is_merged_before_the_next_push() -> None:
    copy = Copy(overlap_steps=3)
    copy.push(1)
    copy.pull(2)
    copy.push(2)
    assert copy.held() == [1, 11, 3]


@pytest.mark.parametrize("overlap", [0, 2])
@pytest.mark.parametrize("has_pulled", [False, True])
def test_what_goes_on_from_a_checkpoint_is_as_it_was(overlap: int, has_pulled: bool) -> None:
    """Through the store one is taken after the push, between peers when the update stands."""

    def finish(one: Copy) -> list[float]:
        if not has_pulled:
            one.pull(5)
        one.own.stepped()
        one.own.stepped()
        one.push(5)
        return one.held()

    copy, other = Copy(overlap_steps=overlap), Copy(overlap_steps=overlap)
    copy.push(4)
    if has_pulled:
        copy.pull(5)
    saved: dict[str, Any] = copy.own.remember()
    other.pull(5)
    assert other.held() == [10, 20, 30]
    other.own.go_on(saved)
    assert finish(other) == finish(copy)


def test_all_at_once_is_remembered_by_nobody() -> None:
    copy = Copy(num_fragments=1)
    copy.push(0)
    assert copy.own.remember() == {}
    copy.pull(1)
    assert copy.held() == [10, 20, 30]
