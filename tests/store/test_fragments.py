"""Fragments are neighbours, all bytes once, and the largest is as small as possible."""

from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.store.fragments import Fragments, cut
from paceline.store.layout import lay_out


@given(st.lists(st.integers(1, 30), min_size=1, max_size=9), st.data())
def test_a_cut_has_the_smallest_possible_largest_fragment(
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


def test_fragments_contain_all_bytes_once_also_with_two_dtypes() -> None:
    named = [
        (str(one), torch.zeros(5 + one, dtype=torch.float64 if one % 2 else torch.float32))
        for one in range(6)
    ]
    section = lay_out(named, [], []).parameters
    fragments = Fragments(section, 3)
    runs = [run for fragment in fragments.each for run in fragment.runs(section)]
    assert sum(stop - start for _, start, stop in runs) == section.stop - section.start
    assert [list(fragment.present) for fragment in fragments.each] == [
        [int(fragment.first <= number < fragment.last) for number in range(6)]
        for fragment in fragments.each
    ]
    assert fragments.of(7) is fragments.each[1]
    assert fragments.of(7, is_last=True) is fragments.whole
    assert [fragment.first for fragment in fragments.between(1, 3)] == [
        fragments.each[1].first, fragments.each[2].first
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="but the model has 6; use --fragments F"):
        Fragments(section, 7)
