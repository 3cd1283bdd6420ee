"""Every collective with every number of ranks gives the result of its operation."""

import itertools
import math
from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.collectives import COLLECTIVES, parse
from paceline.collectives.base import Collective
from paceline.collectives.proof import on_numbers, prove
from paceline.collectives.transfers import Action, ChunkTransfer, Operation, Round, bounds, owner_of
from paceline.errors import ConfigError, ProtocolError

WORLDS = range(1, 18)


def numbers_for(name: str, num_ranks: int) -> list[str]:
    """Every valid spelling of a collective for this number of ranks."""
    argument = COLLECTIVES[name].argument
    if argument is None:
        return [name]
    written = [f"{name}:{value}" for value in range(argument.minimum, num_ranks + 2)]
    return ([name] if argument.default is not None else []) + written


def fitting(num_ranks: int) -> Iterator[Collective]:
    for name in COLLECTIVES:
        for text in numbers_for(name, num_ranks):
            try:
                yield parse(text, num_ranks)
            except ConfigError:
                continue  # invalid spellings are refused by name: test_parse.py


CASES = [
    pytest.param(name, num_ranks, id=f"{name}-{num_ranks}")
    for name, num_ranks in itertools.product(COLLECTIVES, WORLDS)
]


def members(name: str, num_ranks: int) -> list[Collective]:
    return [one for one in fitting(num_ranks) if one.name == name]


def operations(member: Collective) -> Iterator[tuple[Operation, int]]:
    """The operations it supports with this number of ranks, and their roots."""
    for operation in member.operations:
        try:
            member.check(operation)
        except ConfigError:
            continue
        for root in range(member.num_ranks) if operation.has_root else (0,):
            yield operation, root


@pytest.mark.parametrize(("name", "num_ranks"), CASES)
def test_every_rank_ends_with_each_contribution_once(name: str, num_ranks: int) -> None:
    """Computed on sets of contributors, so it holds for all values. Ports are checked, too."""
    result = members(name, num_ranks)
    assert result, "no spelling of it fits so many ranks"
    for member in result:
        for operation, root in operations(member):
            proof = prove(member, operation, root)
            assert proof.most_sent <= member.num_ports(operation)
            assert (proof.num_rounds == 0) == (num_ranks == 1)


@pytest.mark.parametrize(("name", "num_ranks"), CASES)
def test_sums_are_right_for_any_number_of_elements(name: str, num_ranks: int) -> None:
    member = members(name, num_ranks)[-1]
    for num_elements in (0, 1, 2, num_ranks - 1, num_ranks, num_ranks + 1, 37, 1000):
        given_ = [[7**rank + 3 * i for i in range(num_elements)] for rank in range(num_ranks)]
        total = [sum(column) for column in zip(*given_, strict=True)]
        ended = on_numbers(member, Operation.ALL_REDUCE, given_)
        assert ended == [total] * num_ranks


@pytest.mark.parametrize(("name", "num_ranks"), CASES)
def test_all_ranks_end_with_the_same_bits(name: str, num_ranks: int) -> None:
    """Even where another order of the sum would give other bits, as here."""
    member = members(name, num_ranks)[-1]
    random = Random(num_ranks)
    begun = [
        [random.uniform(-1, 1) * 10 ** random.randint(-9, 9) for _ in range(40)]
        for _ in range(num_ranks)
    ]
    ended = on_numbers(member, Operation.ALL_REDUCE, begun)
    assert all(one == ended[0] for one in ended)
    total = [math.fsum(column) for column in zip(*begun, strict=True)]
    assert ended[0] == pytest.approx(total, rel=1e-6)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_every_operation_gives_the_result_of_the_table(data: st.DataObject) -> None:
    num_ranks = data.draw(st.integers(1, 17), label="ranks")
    member = data.draw(st.sampled_from(list(fitting(num_ranks))), label="collective")
    operation, root = data.draw(st.sampled_from(list(operations(member))), label="operation")
    num_elements = data.draw(st.integers(0, 200), label="elements")
    begun = [
        data.draw(st.lists(st.integers(-9, 9), min_size=num_elements, max_size=num_elements))
        for _ in range(num_ranks)
    ]
    ended = on_numbers(member, operation, begun, root)
    num_chunks = member.num_chunks(operation)
    for chunk, (begin, end) in enumerate(bounds(num_elements, num_chunks)):
        owner = owner_of(chunk, num_chunks, num_ranks)
        source = root if operation in (Operation.BROADCAST, Operation.SCATTER) else owner
        expected = begun[source][begin:end]
        if operation.is_reducing:
            expected = [sum(column) for column in zip(*begun, strict=True)][begin:end]
        holders = {
            Operation.REDUCE: [root],
            Operation.GATHER: [root],
            Operation.REDUCE_SCATTER: [owner],
            Operation.SCATTER: [owner],
            Operation.ALL_TO_ALL: [chunk % num_ranks],
        }.get(operation, list(range(num_ranks)))
        for rank in holders:
            assert ended[rank][begin:end] == expected, (str(member), operation, rank, chunk)


@pytest.mark.parametrize("num_ranks", range(2, 18))
def test_ring_moves_the_fewest_possible_bytes(num_ranks: int) -> None:
    """2 (P - 1) / P of the buffer per rank, which is 2 (P - 1) of P chunks."""
    for name in ("ring", "bidirectional-ring"):
        member = parse(name, num_ranks)
        sent = prove(member, Operation.ALL_REDUCE).chunks_sent
        assert sum(sent) == 2 * (num_ranks - 1) * num_ranks
        assert set(sent) == {2 * (num_ranks - 1)} or name == "bidirectional-ring"
        assert max(sent) - min(sent) <= 1


@pytest.mark.parametrize("num_ranks", [2, 4, 8, 16])
def test_butterflies_move_the_fewest_bytes_in_the_fewest_rounds(num_ranks: int) -> None:
    for name in ("halving-doubling", "bine"):
        proof = prove(parse(name, num_ranks), Operation.ALL_REDUCE)
        assert set(proof.chunks_sent) == {2 * (num_ranks - 1)}
        assert proof.num_rounds == 2 * (num_ranks.bit_length() - 1)


def test_bine_partners_are_two_thirds_as_far_apart() -> None:
    """Modulo 256 ranks, summed over the rounds of a reduce-scatter."""
    hops = {}
    for name in ("halving-doubling", "bine"):
        rounds = list(parse(name, 256).rounds(Operation.REDUCE_SCATTER))
        apart = [(one[0].destination - one[0].source) % 256 for one in rounds]
        hops[name] = sum(min(distance, 256 - distance) for distance in apart)
    assert hops["halving-doubling"] == 255
    assert hops["bine"] == pytest.approx(255 * 2 / 3, rel=0.01)


@pytest.mark.parametrize("num_ranks", [2, 4, 8, 16])
def test_late_rank_takes_part_in_half_the_rounds_of_a_ring(num_ranks: int) -> None:
    """n + log2 n - 2 rounds, of which it takes part in n - 1 + log2 n - 1."""
    log2 = num_ranks.bit_length() - 1
    for late in range(num_ranks):
        rounds = list(parse(f"straggler-aware:{late}", num_ranks).rounds(Operation.ALL_REDUCE))
        with_it = [one for one in rounds if any(late in (t.source, t.destination) for t in one)]
        assert len(with_it) == num_ranks + log2 - 2
        assert rounds[-len(with_it) :] == with_it  # it takes part in no earlier round
        assert len(rounds) - len(with_it) == num_ranks - 2


class Broken(Collective):
    """A collective with any given rounds."""

    name = "broken"
    summary = ""
    formula = ""
    operations = tuple(Operation)

    def __init__(self, num_ranks: int, rounds: list[Round]) -> None:
        super().__init__(num_ranks)
        self.given = rounds

    def _rounds(self, operation: Operation, root: int) -> list[Round]:
        return self.given

    def _seconds(self, *_: object) -> float:
        return 0.0


def message(source: int, destination: int, chunk: int = 0, *, copy: bool = False) -> ChunkTransfer:
    action = Action.COPY if copy else Action.REDUCE
    return ChunkTransfer(source, destination, (chunk,), action)


@pytest.mark.parametrize(
    ("rounds", "said"),
    [
        ([(message(1, 0), message(2, 0))], "2 messages at a rank of 1 ports"),
        ([(message(0, 0),)], "rank 0 sends to itself"),
        ([(message(0, 3),)], "a message from 0 to 3"),
        ([(message(1, 0),), (message(1, 0),)], "it has {0, 1} and adds {1}"),
        ([(message(1, 0),)], "ends with {0, 1} in chunk 0, not with {0, 1, 2}"),
        ([(message(1, 0),), (message(2, 0, copy=True),)], "ends with {2} in chunk 0"),
    ],
)
def test_wrong_schedule_is_detected(rounds: list[Round], said: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        prove(Broken(3, rounds), Operation.ALL_REDUCE)
    assert said in str(caught.value)


def test_sending_a_chunk_the_source_lacks_is_detected() -> None:
    with pytest.raises(ProtocolError, match="rank 1 sends what it does not have"):
        prove(Broken(3, [(message(1, 0, copy=True),)]), Operation.BROADCAST)
    # Here the source would have it only at the end of the round.
    together = (message(0, 1, copy=True), message(1, 2, copy=True))
    with pytest.raises(ProtocolError, match="sends what it does not have"):
        prove(Broken(3, [together]), Operation.BROADCAST)


def test_buffers_of_different_lengths_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"3 ranks need as many buffers of one length, got \[1, 2"
    ):
        on_numbers(parse("ring", 3), Operation.ALL_REDUCE, [[1], [1, 2], [1]])
