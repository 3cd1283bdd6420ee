"""16-bit pushes are averaged as in 32 bits and rounded once, on every path."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from paceline.replica.replica import Replica
from paceline.store.control import GENERATION, Control, control_bytes
from paceline.store.means import average_into, average_of_buffers
from paceline.store.memory import PrivateMemory
from paceline.store.optimizer import Updater
from paceline.store.parameter_store import SharedStore, arena_bytes
from paceline.store.sums import wide_bytes

NUM_SEATS = 8
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


class Dead(BaseException):
    """The executor is gone."""


class Rig:
    """A store with arbitrary pushes; a model of two dtypes, with buffers."""

    def __init__(self, dtype: torch.dtype) -> None:
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(300, 700), nn.BatchNorm1d(700)).to(dtype)
        model.append(nn.Linear(7, 5))
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        self.replica = Replica(model, self.optimizer, self.optimizer)
        self.layout = self.replica.layout
        memory = PrivateMemory(arena_bytes(self.layout, NUM_SEATS))
        control = Control(PrivateMemory(control_bytes(NUM_SEATS)), NUM_SEATS)
        self.store = SharedStore(self.layout, memory.tensor(), control)
        self.updaters = [
            Updater(self.optimizer, self.replica.parameters, self.layout, block)
            for block in self.store.blocks
        ]
        self.replica.write_to(self.store.blocks[0])
        self.weights = [(1 + seat) / 36 for seat in range(NUM_SEATS)]
        for seat in range(NUM_SEATS):
            for place in self.places:
                place.view(self.store.slot(seat)).copy_(torch.randn(place.shape))
            self.store.present(seat)[:] = b"\1" * len(self.layout.parameters.places)

    @property
    def places(self) -> list[object]:
        every = [*self.layout.parameters.places, *self.layout.buffers.places]
        return [place for place in every if place.dtype.is_floating_point]

    def add_all(self) -> None:
        for seat, weight in enumerate(self.weights):
            self.store.add(1 + seat, seat, weight, seat == 0)

    def finish(self, scale: float = 1.0) -> None:
        self.store.finish(
            1 + NUM_SEATS, self.updaters, self.optimizer.param_groups, seat=-1, scale=scale
        )

    def wanted(self, place: object, scale: float = 1.0) -> Tensor:
        """The average in at least 32 bits, rounded at the end."""
        parts = [place.view(self.store.slot(seat)) for seat in range(NUM_SEATS)]
        total = parts[0].float() * self.weights[0]
        for part, weight in zip(parts[1:], self.weights[1:], strict=True):
            total.add_(part.float(), alpha=weight)
        return (total * scale).to(place.dtype)

    def assert_averaged(self, scale: float = 1.0) -> None:
        for place in self.places:
            assert torch.equal(place.view(self.store.sum_slot), self.wanted(place, scale))


def test_a_block_that_changed_while_it_was_read_is_read_again() -> None:
    store, tried = Rig(torch.float32).store, list[int]()

    def read(block: int) -> int:
        tried.append(block)
        if len(tried) == 1:
            store.control[GENERATION[block]] += 2  # two more updates have been made
        return len(tried)

    assert store.read_whole(read) == 2
    assert tried == [0, 0]


@HALVES
@pytest.mark.parametrize("scale", [1.0, 0.75])
def test_a_sum_in_the_store_is_rounded_once(dtype: torch.dtype, scale: float) -> None:
    rig = Rig(dtype)
    rig.add_all()
    rig.finish(scale)
    for place in rig.layout.parameters.places:
        assert torch.equal(place.view(rig.store.sum_slot), rig.wanted(place, scale))


@HALVES
def test_each_update_starts_a_new_sum(dtype: torch.dtype) -> None:
    rig = Rig(dtype)
    rig.add_all()
    rig.finish()
    rig.add_all()
    rig.finish()
    rig.assert_averaged()


@HALVES
@pytest.mark.parametrize("chunk", [0, 1, 2])
def test_a_member_that_takes_over_a_partial_sum_adds_nothing_twice(
    dtype: torch.dtype, chunk: int
) -> None:
    """Its executor dies after changing a chunk and before recording it."""
    rig = Rig(dtype)
    rig.store.add(1, 0, rig.weights[0], True)
    rig.store.add(2, 1, rig.weights[1], False)
    _die_in(rig.store, chunk, lambda: rig.store.add(3, 2, rig.weights[2], False))
    rig.store.add(3, 2, rig.weights[2], False)
    for seat in range(3, NUM_SEATS):
        rig.store.add(1 + seat, seat, rig.weights[seat], False)
    _die_in(rig.store, chunk, lambda: rig.finish(0.75))
    rig.finish(0.75)
    for place in rig.layout.parameters.places:
        assert torch.equal(place.view(rig.store.sum_slot), rig.wanted(place, 0.75))


def _die_in(store: SharedStore, chunk: int, job: Callable[[], None]) -> None:
    over = store._sums._over_chunks

    def dying(number: int, change: Callable[..., None], **options: bool) -> None:
        seen = []

        def change_and_die(run: object) -> None:
            change(run)
            seen.append(run)
            if len(seen) == chunk + 1:
                raise Dead

        over(number, change_and_die, **options)

    store._sums._over_chunks = dying  # type: ignore[method-assign]
    with pytest.raises(Dead):
        job()
    store._sums._over_chunks = over  # type: ignore[method-assign]


def test_the_norm_of_a_16_bit_sum_is_computed_in_32_bits() -> None:
    rig = Rig(torch.bfloat16)
    rig.add_all()
    results = rig.store._sums.gradients(0)
    norm = math.sqrt(math.fsum(float(result.double().square().sum()) for result in results))
    wanted = math.sqrt(
        math.fsum(
            float(
                sum(
                    place.view(rig.store.slot(seat)).double() * weight
                    for seat, weight in enumerate(rig.weights)
                )
                .square()
                .sum()
            )
            for place in rig.layout.parameters.places
        )
    )
    assert norm == pytest.approx(wanted, rel=1e-6)


@HALVES
@pytest.mark.parametrize("num_parts", [1, 2, 3, 8])
def test_an_average_between_peers_is_rounded_once(dtype: torch.dtype, num_parts: int) -> None:
    torch.manual_seed(2)
    parts = [torch.randn(100_003).to(dtype) for _ in range(num_parts)]
    weights = [(1 + i) / sum(range(1, num_parts + 1)) for i in range(num_parts)]
    mean = torch.empty_like(parts[0])
    average_into(mean, parts, weights)
    wanted = parts[0].double() * weights[0]
    for part, weight in zip(parts[1:], weights[1:], strict=True):
        wanted.add_(part.double(), alpha=weight)
    least = (wanted.to(dtype) - wanted).abs() + 1e-6  # what 32 bits leave of a tie
    assert ((mean - wanted).abs() <= least).all()
    assert ((average_of_buffers(parts, weights) - wanted).abs() <= least).all()


# -- buffers that are the same in all workers -----------------------------------------------------

KINDS = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
UNEVEN = (1 / 3, 1 / 3, 1 / 3), (16 / 50, 17 / 50, 17 / 50), (0.2, 0.2, 0.2, 0.2, 0.2)


@KINDS
@pytest.mark.parametrize("weights", UNEVEN, ids=len)
def test_equal_buffers_in_all_workers_are_unchanged_by_averaging(
    dtype: torch.dtype, weights: tuple[float, ...]
) -> None:
    same = (torch.arange(2000.0) / 64 + 1.0).to(dtype)
    parts = [same.clone() for _ in weights]
    assert torch.equal(average_of_buffers(parts, weights), same)
    parts[0][0] = 5.0  # all others are
    results = average_of_buffers(parts, weights)
    assert torch.equal(results[1:], same[1:])
    assert float(results[0]) == pytest.approx(5.0 * weights[0] + 1.0 - weights[0], rel=1e-2)


@KINDS
@pytest.mark.parametrize("scale", [1.0, 0.75])
def test_equal_buffers_are_unchanged_in_the_store_also_after_a_death(
    dtype: torch.dtype, scale: float
) -> None:
    rig = Rig(dtype)
    rig.weights = [weight / scale for weight in rig.weights]
    wanted = {}
    for place in rig.layout.buffers.places:
        whole = torch.arange(place.numel) + 3
        wanted[place.name] = whole.to(place.dtype).view(place.shape)
        for seat in range(NUM_SEATS):
            place.view(rig.store.slot(seat)).copy_(wanted[place.name])
    rig.add_all()
    _die_in(rig.store, 0, lambda: rig.finish(scale))
    rig.finish(scale)
    for place in rig.layout.buffers.places:
        assert torch.equal(place.view(rig.store.blocks[rig.store.current]), wanted[place.name])


def test_a_model_without_rounding_has_no_wide_sums() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).double(), nn.BatchNorm1d(3).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    assert wide_bytes(Replica(model, optimizer, optimizer).layout) == 0


def test_counters_of_any_dtype_are_averaged_to_their_maximum() -> None:
    for dtype in (torch.bool, torch.int16, torch.uint16, torch.uint32, torch.int64):
        parts = [torch.tensor([0, 1]).to(dtype), torch.tensor([1, 0]).to(dtype)]
        result = average_of_buffers(parts, (0.5, 0.5))
        assert (result.dtype, result.tolist()) == (dtype, [1, 1])
