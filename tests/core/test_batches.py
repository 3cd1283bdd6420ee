"""How an epoch is split: every position once, as evenly as possible, the same for all."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.batches import Batches, PeerLeases, share
from paceline.core.cuts import Cuts
from paceline.errors import ConfigError
from paceline.events import Lease


def _all(batches: Batches) -> list[Lease]:
    return Cuts(batches, 0, 0).all()


@given(st.integers(1, 300), st.integers(1, 8), st.integers(0, 60), st.booleans())
def test_leases_cover_every_position_once(
    num_samples: int, parts: int, spare: int, keep_remainder: bool
) -> None:
    batch_size = parts + spare
    if not keep_remainder and num_samples < batch_size:
        return
    batches = Batches(num_samples, batch_size, parts, keep_remainder=keep_remainder)
    leases = _all(batches)
    covered = [position for lease in leases for position in range(lease.start, lease.stop)]
    end = num_samples if keep_remainder else num_samples // batch_size * batch_size
    assert covered == list(range(end))
    assert [lease.id for lease in leases] == list(range(len(leases)))
    assert all(lease.num_samples > 0 for lease in leases)


@given(st.integers(1, 300), st.integers(1, 8), st.integers(0, 60))
def test_mini_batches_of_one_batch_differ_by_at_most_one_sample(
    num_samples: int, parts: int, spare: int
) -> None:
    batches = Batches(num_samples, parts + spare, parts)
    for batch in range(batches.num_batches):
        sizes = [lease.num_samples for lease in batches.cut(batch, 0, 0)]
        assert max(sizes) - min(sizes) <= 1
        assert len(sizes) == min(parts, sum(sizes))


def test_a_remainder_is_split_as_evenly_as_other_batches() -> None:
    sizes = [lease.num_samples for lease in _all(Batches(13, 8, 3))]
    assert sizes == [2, 3, 3, 1, 2, 2]


def test_a_remainder_smaller_than_the_pushes_gives_fewer_leases() -> None:
    assert [lease.num_samples for lease in _all(Batches(10, 8, 4))] == [2, 2, 2, 2, 1, 1]


def test_an_epoch_of_another_length_has_batches_of_the_usual_size() -> None:
    usual = Batches(20, 4, 2)
    assert usual.own_ends is None
    for end in (10, 4_000_000_000):  # shorter, and much longer; nothing is listed
        other = usual.with_ends(end)
        assert (other.end, other.num_batches, other.own_ends) == (end, -(-end // 4), end)
        assert other.cut(0, 0, 0) == usual.cut(0, 0, 0)
    assert [lease.stop for lease in usual.with_ends(10).cut(2, 0, 0)] == [9, 10]


def test_batches_of_a_custom_sampler_are_kept() -> None:
    batches = Batches(100, 8, 2, ends=[3, 4, 10])
    assert batches.num_batches == 3
    assert [(lease.start, lease.stop) for lease in _all(batches)] == [
        (0, 1),
        (1, 3),
        (3, 4),
        (4, 7),
        (7, 10),
    ]


@given(st.integers(1, 200), st.integers(1, 5), st.integers(0, 9))
def test_with_columns_a_part_has_the_same_places_in_every_batch(
    num_samples: int, parts: int, spare: int
) -> None:
    size = parts + spare
    batches = Batches(num_samples, size, parts, has_columns=True)
    columns = [size * part // parts for part in range(parts + 1)]
    for number in range(batches.num_batches):
        start, stop = batches.bounds(number)
        for part, lease in enumerate(batches.cut(number, 0, 0)):
            first, last = columns[part : part + 2]
            assert (lease.start, lease.stop) == (start + first, min(start + last, stop))
            assert batches.part_at(lease.start) == part
    every = _all(batches)
    assert [batches.lease(i, 0, lease.id) for i, lease in enumerate(every)] == every
    assert [p for lease in every for p in range(lease.start, lease.stop)] == list(
        range(num_samples)
    )


def test_with_columns_all_batches_but_the_last_have_one_size() -> None:
    usual = Batches(20, 4, 2, has_columns=True)
    assert [(lease.start, lease.stop) for lease in _all(usual.with_ends([6, 12, 16]))] == [
        (0, 3), (3, 6), (6, 9), (9, 12), (12, 15), (15, 16),
    ]  # fmt: skip
    for ends in ([4, 12], [6, 10, 16], [1, 2]):
        with pytest.raises(ConfigError, match="sticky=True: a batch of"):
            usual.with_ends(ends)


@given(
    st.tuples(st.integers(1, 50), st.integers(1, 50)),
    st.tuples(st.integers(1, 50), st.integers(1, 50)),
    st.integers(1, 6),
)
def test_shares_of_a_batch_cover_it_once(
    own: tuple[int, int], whole: tuple[int, int], parts: int
) -> None:
    """Each sample is in one of them, also where they are uneven; even shares equal even splits."""
    (first, size), (start, length) = own, whole
    borders = [start + length * part // parts for part in range(parts + 1)]
    results = [share((first, first + size), (start, start + length), border) for border in borders]
    assert (results[0], results[-1]) == (first, first + size)
    assert results == sorted(results)
    if size % parts == length % parts == 0:
        assert results == [first + size * part // parts for part in range(parts + 1)]


BATCHES = st.one_of(
    st.builds(
        lambda samples, parts, spare: Batches(samples, parts + spare, parts),
        st.integers(1, 200), st.integers(1, 5), st.integers(0, 9),
    ),
    st.builds(
        lambda ends, parts: Batches(300, 8, parts, ends=sorted(ends)),
        st.sets(st.integers(1, 300), min_size=1, max_size=20), st.integers(1, 5),
    ),
)  # fmt: skip


@given(BATCHES, st.integers(1, 4), st.integers(1, 3), st.integers(0, 301), st.integers(0, 9))
def test_rounds_of_peers_give_out_every_lease_in_order(
    batches: Batches, num_members: int, num_steps: int, position: int, first_id: int
) -> None:
    every = [lease for lease in _all(batches) if lease.start >= position]
    rest = [lease._replace(id=first_id + i) for i, lease in enumerate(every)]
    leases = PeerLeases(
        batches, num_members, num_steps, epoch=0, position=position, first_id=first_id
    )
    rounds = [
        [leases.of(number, rank) for rank in range(num_members)]
        for number in range(leases.num_rounds)
    ]
    assert [lease for row in rounds for own in row for lease in own] == rest
    assert all(len(own) == num_steps for row in rounds[:-1] for own in row)
    last = [len(own) for own in rounds[-1]] if rounds else [0]
    assert max(last) - min(last) <= 1


@given(BATCHES, st.integers(1, 4), st.integers(1, 4), st.integers(0, 5), st.integers(0, 301))
def test_a_round_starts_at_its_first_lease(
    batches: Batches, num_members: int, num_steps: int, num_short: int, position: int
) -> None:
    """Also after short rounds, and where all batches are of one size."""
    leases = PeerLeases(batches, num_members, num_steps, num_short, epoch=0, position=position)
    for number in range(leases.num_rounds):
        own = [lease for rank in range(num_members) for lease in leases.of(number, rank)]
        assert leases.begins_at(number) == own[0].start


@given(BATCHES, st.integers(0, 60), st.integers(0, 301), st.integers(0, 9))
def test_leases_are_found_by_position_and_index_without_making_all(
    batches: Batches, num_taken: int, position: int, first_id: int
) -> None:
    cuts = Cuts(batches, 0, first_id)
    for _ in range(num_taken):
        cuts.take()
    every = cuts.all()
    assert batches.num_leases == len(every)
    assert [batches.lease(i, 0, first_id + i) for i in range(len(every))] == every
    assert batches.num_leases_before(position) == sum(lease.start < position for lease in every)
    expected = next((lease.id for lease in every if lease.start >= position), 0)
    assert cuts.first_id(position) == expected


def test_an_epoch_of_a_billion_samples_is_given_out_at_once() -> None:
    leases = PeerLeases(Batches(10**9, 64, 64), 64, 1, epoch=0, position=64 * 10**6)
    assert leases.num_rounds == (10**9 - 64 * 10**6) / 64
    start = 64 * 10**6 + 64 * 12345 + 7
    assert leases.of(12345, 7) == [Lease(64 * 12345 + 7, 0, start, start + 1)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Batches(10, 3, 4), "batch size must be >= 4, the pushes of an update, got 3"),
        (lambda: Batches(0, 3, 1), "an epoch needs at least 1 sample, got 0"),
        (lambda: Batches(5, 8, 1, keep_remainder=False), "5 samples do not fill one batch of 8"),
        (lambda: Batches(5, 2, 1, ends=[2, 2]), "batches must have at least one sample each"),
        (lambda: Batches(5, 2, 1, ends=[]), "batches must have at least one sample each"),
    ],
)
def test_impossible_sizes_are_refused(make: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()  # type: ignore[operator]
