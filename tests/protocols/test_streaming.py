"""Fragments: what is written, what is refused, and that the largest is as small as can be."""

from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.protocols import parse
from paceline.protocols.streaming import Streaming
from paceline.store.fragments import Fragments, cut
from paceline.store.layout import lay_out


@pytest.mark.parametrize(
    "text", ["local-sgd:8+fragments:4", "local-sgd:8+nesterov:0.7,0.9+fragments:4,1"]
)
def test_a_protocol_is_read_as_it_is_written(text: str) -> None:
    protocol = parse(text, 2)
    assert str(protocol) == text
    assert protocol.num_steps == 2
    assert parse(text, 2, streaming=protocol.streaming).streaming == protocol.streaming


@pytest.mark.parametrize(
    ("text", "workers", "words"),
    [
        ("local-sgd:8+fragments:3", 2, "8 local steps of local-sgd:8 cannot be shared by 3"),
        ("local-sgd:8+fragments:3", 2, "use --fragments 2 or 4 or 8, or --protocol local-sgd:9"),
        ("local-sgd:8+fragments:4,2", 2, "overlap must be below the 2 local steps .*--overlap 1"),
        ("local-sgd:8+fragments:1,8", 2, "overlap must be below the 8 .*in 1 fragment, got 8"),
        ("full-sync+fragments:2", 2, "under full-sync workers push gradients; leave --fragments"),
        ("post-local-sgd:3,8+fragments:2", 2, "H changes.* or use --protocol local-sgd:H$"),
        ("adaptive-local:8+fragments:2", 2, "H changes"),
        ("local-sgd:8+fragments:2", 1, "needs workers that exchange .* there is one"),
        ("local-sgd:8+fragments:x", 2, "takes one or two whole numbers, got 'fragments:x'"),
        ("local-sgd:8+fragments:0", 2, "fragments must be >= 1, got 0"),
        ("local-sgd:8+fragments:2,-1", 2, "overlap must be >= 0, got -1"),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(text: str, workers: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse(text, workers)


def test_two_kinds_of_fragments_are_refused() -> None:
    with pytest.raises(ConfigError, match="names fragments, and fragments:4 are others"):
        parse("local-sgd:8+fragments:2", 2, streaming=Streaming(num_fragments=4))


@given(st.lists(st.integers(1, 30), min_size=1, max_size=9), st.data())
def test_the_largest_fragment_is_the_least_of_all_cuts(
    sizes: list[int], data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, len(sizes)))
    firsts = cut(sizes, count)
    assert firsts[0] == 0
    assert len(firsts) == count
    assert firsts == sorted(set(firsts))

    def largest(starts: tuple[int, ...]) -> int:
        ends = (*starts[1:], len(sizes))
        return max(sum(sizes[a:b]) for a, b in zip(starts, ends, strict=True))

    others = combinations(range(1, len(sizes)), count - 1)
    assert largest(tuple(firsts)) == min(largest((0, *one)) for one in others)


def test_fragments_are_all_bytes_once_also_of_two_types_of_numbers() -> None:
    named = [
        (str(one), torch.zeros(5 + one, dtype=torch.float64 if one % 2 else torch.float32))
        for one in range(6)
    ]
    section = lay_out(named, [], []).parameters
    fragments = Fragments(section, 3)
    runs = [run for one in fragments.each for run in one.runs(section)]
    assert sum(stop - start for _, start, stop in runs) == section.stop - section.start
    assert [list(one.present) for one in fragments.each] == [
        [int(one.first <= number < one.last) for number in range(6)] for one in fragments.each
    ]
    assert fragments.of(7) is fragments.each[1]
    assert fragments.of(7, is_last=True) is fragments.whole
    assert [one.first for one in fragments.between(1, 3)] == [
        fragments.each[1].first, fragments.each[2].first
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="and the model has 6; use --fragments 6 or less"):
        Fragments(section, 7)
