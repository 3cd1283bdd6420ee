"""The words of a run: none shares its place or overflows, and each orders the memory beside it."""

import multiprocessing
import os
import threading
from itertools import pairwise

import pytest
import torch

from paceline.errors import ConfigError
from paceline.store import control as names
from paceline.store import fences
from paceline.store.control import GENERATION, JOBS, VERSION, Control, control_bytes
from paceline.store.fences import Fenced, ordered
from paceline.store.memory import LINE_BYTES, WORD_BYTES, PrivateMemory, SharedMemory
from paceline.store.versions import Norms, RhythmWords

SEATS = 3
BEYOND = 2**40
SIZE, WRITES = 1 << 16, 400
WIDTHS = {
    "RHYTHMS": names.MOST_SCHEDULES, "COUNTS": 2 * names.MOST_SCHEDULES,
    "ARGUMENTS": names.MOST_SCHEDULES, "NORMS": 2 * names.NORMS_KEPT, "SCALE": 6,
}  # fmt: skip
"""Words that begin at a name, where it is more than one."""


def _places() -> list[tuple[int, int, str]]:
    """First word, words and name of everything on the page."""
    results = []
    sizes = ("LINE_BYTES", "WORD_BYTES", "MOST_SCHEDULES", "NORMS_KEPT")
    for name, value in vars(names).items():
        if name.isupper() and not name.startswith("_") and name not in sizes:
            places = value if isinstance(value, tuple) else (value,)
            results += [(place, WIDTHS.get(name, 1), name) for place in places]
    page = Control(PrivateMemory(control_bytes(SEATS)), SEATS)
    for seat in range(SEATS):
        for name, width in (("cancelled", 1), ("gone", 1), ("beats", 1), ("arrived", 1),
                            ("marks", 1), ("numbers", 16), ("offers", 6)):  # fmt: skip
            results.append((getattr(page, name)[seat], width, f"{name}[{seat}]"))
    return sorted(results)


def test_no_two_names_share_a_word() -> None:
    for (first, width, name), (second, _, other) in pairwise(_places()):
        assert first + width <= second, f"{name} and {other}"
    last, width, _ = _places()[-1]
    assert (last + width) * WORD_BYTES <= control_bytes(SEATS)


def test_norms_of_updates_do_not_overwrite_schedules() -> None:
    page = Control(PrivateMemory(control_bytes(SEATS)), SEATS)
    words = [RhythmWords(page, number) for number in range(names.MOST_SCHEDULES)]
    for number, word in enumerate(words):
        word.rhythm, word.count, word.end, word.argument = number, 10 + number, 20 + number, 0.5
    for version in range(40):
        Norms(page).note(version, 3.25)
    seen = [(word.rhythm, word.count, word.end, word.argument) for word in words]
    assert seen == [(number, 10 + number, 20 + number, 0.5) for number in range(len(words))]


def test_waiting_works_for_a_version_beyond_any_run() -> None:
    memory = SharedMemory.create(control_bytes(1))
    page, other = Control(memory, 1), Control(memory, 1)
    page[VERSION] = 2 * BEYOND
    assert not page.wait_for_version(BEYOND + 1, 0.01)
    wakes = threading.Timer(0.05, other.set_and_wake, (VERSION, 2 * (BEYOND + 1) + 1))
    wakes.start()
    assert page.wait_for_version(BEYOND + 1, 10.0)
    assert page.version == BEYOND + 1
    page[JOBS] = 2**33
    assert page.wait_for_job(2**33, 0.0)
    assert not page.wait_for_job(2**33 + 1, 0.0)


def _write(descriptor: int) -> None:
    """Change a block as a whole, under a word that is odd meanwhile."""
    memory = SharedMemory(descriptor)
    page, data = Control(memory, 1), memory.tensor()[-SIZE:]
    for number in range(WRITES):
        page[GENERATION[0]] += 1
        data.fill_(number % 251)
        page[GENERATION[0]] += 1
    page.set_and_wake(JOBS, 1)


def test_a_reader_sees_a_whole_block_or_knows_that_it_does_not() -> None:
    """On a processor that reorders, words without fences fail here."""
    memory = SharedMemory.create(-(-control_bytes(1) // LINE_BYTES) * LINE_BYTES + SIZE)
    page, data = Control(memory, 1), memory.tensor()[-SIZE:]
    writer = multiprocessing.get_context("fork").Process(target=_write, args=(os.dup(memory.fd),))
    writer.start()
    num_whole, copy = 0, torch.empty_like(data)
    while not page[JOBS] or not num_whole:
        before = page[GENERATION[0]]
        copy.copy_(data)
        if not before & 1 and page[GENERATION[0]] == before:
            num_whole += 1
            assert bool((copy == copy[0]).all())
    writer.join(10.0)
    assert num_whole


def test_a_reordering_processor_has_a_fence_on_both_sides_of_a_word() -> None:
    calls: list[str] = []
    words = Fenced([7, 8], lambda: calls.append("fence"))
    words[1] = 9
    assert words[1] == 9
    assert calls == ["fence"] * 4


def test_a_processor_without_a_fence_is_refused_with_advice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(_: object) -> None:
        raise OSError

    monkeypatch.setattr(fences.ctypes, "CDLL", missing)
    monkeypatch.setattr(fences.platform, "machine", lambda: "aarch64")
    with pytest.raises(ConfigError, match=r"a memory fence on aarch64.*libatomic1"):
        ordered([0], has_order=False)
    assert ordered([5], has_order=True) == [5]
