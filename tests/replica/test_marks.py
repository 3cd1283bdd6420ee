"""Marks alone: an edit is found at once, in the first step that checks its place, or never."""

import pytest
import torch

from paceline.replica.held import Marks, first_difference

LARGE = 3 << 20


def test_few_bytes_are_all_checked() -> None:
    memory = torch.zeros(64 * 100, dtype=torch.uint8)
    marks = Marks(memory, [(64, 128), (640, 6400)])
    marks.set()
    assert marks.is_whole
    assert marks.changed() is None
    for outside in (0, 200):
        memory[outside] = 1
        assert marks.changed() is None
    for inside in (64, 127, 640, 6399):
        memory[inside] = 1
        assert marks.changed() == inside
        memory[inside] = 0


@pytest.mark.parametrize("size", [LARGE, LARGE + 64 * 3])
def test_every_one_of_many_bytes_is_checked_in_turn(size: int) -> None:
    memory = torch.zeros(size, dtype=torch.uint8)
    marks = Marks(memory, [(0, size)])
    assert not marks.is_whole
    for at in (0, 255, 256, 777_777, LARGE - 1, size - 1):
        steps = 0
        marks.set()
        memory[at] = 1
        while marks.changed() is None:
            memory[at] = 0
            marks.set()
            memory[at] = 1
            steps += 1
            assert steps < size // (128 * 256) + 2
        memory[at] = 0


def test_an_edit_of_a_whole_layer_is_found_at_once() -> None:
    memory = torch.zeros(LARGE, dtype=torch.uint8)
    marks = Marks(memory, [(0, LARGE)])
    for start in range(0, LARGE - 30_000, 99_968):
        marks.set()
        memory[start : start + 30_000] = 1
        changed = marks.changed()
        assert changed is not None
        assert start - 256 < changed < start + 30_000
        memory[start : start + 30_000] = 0


@pytest.mark.parametrize("size", [64, 6400, LARGE, LARGE + 64 * 3])
def test_a_glance_finds_an_overwritten_block(size: int) -> None:
    memory = torch.zeros(size + 64, dtype=torch.uint8)
    marks = Marks(memory, [(64, 64 + size)])
    for _ in range(3):
        marks.set()
        assert marks.glance() is None
        memory[:64] = 1
        assert marks.glance() is None
        memory[64:] = 1
        offset = marks.glance()
        assert offset is not None
        assert 64 <= offset < 64 + size
        memory.zero_()


def test_a_glance_finds_a_changed_end() -> None:
    memory = torch.zeros(6400, dtype=torch.uint8)
    marks = Marks(memory, [(0, 640), (3200, 6400)])
    marks.set()
    memory[6399] = 1
    assert marks.glance() == 6400 - 256


def test_marks_may_be_set_from_other_memory() -> None:
    memory, other = torch.zeros(2, LARGE, dtype=torch.uint8).unbind()
    other[:] = 1
    marks = Marks(memory, [(0, LARGE)])
    marks.set(other)
    assert marks.changed() is not None
    memory[:] = 1
    assert marks.changed() is None


def test_nan_equals_itself() -> None:
    memory = torch.full((8,), torch.nan).view(torch.uint8)
    assert first_difference(memory, memory.clone()) is None
