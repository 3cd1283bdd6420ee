"""A unit of parameters: gathered from pieces, its gradient reduced to pieces."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import ConfigError
from paceline.spread.group import Ranks
from paceline.spread.units import ParameterUnit, UnitRooms, unit_bytes
from threaded import in_threads

FEW, MANY = 5, 20_001
"""Elements for gloo's operations, and for messages between members (exchange/group.py)."""


def unit_of(ranks: Ranks, numel: int) -> tuple[ParameterUnit, list[nn.Parameter], UnitRooms]:
    """A weight, and another that gets no gradient."""
    rng = torch.Generator().manual_seed(numel)  # one for each thread
    made = [nn.Parameter(torch.randn(size, generator=rng)) for size in (numel, 3)]
    rooms = UnitRooms()
    named = list(zip(("weight", "unused"), made, strict=True))
    return ParameterUnit(0, None, named, ranks.everyone, rooms), made, rooms


@pytest.mark.parametrize("numel", [FEW, MANY])
@pytest.mark.parametrize("size", [2, 3])
def test_unit_is_gathered_in_place(size: int, numel: int) -> None:
    """Without an extra copy of a piece."""

    def work(ranks: Ranks) -> bool:
        unit, made, rooms = unit_of(ranks, numel)
        wanted = [one.detach() + 1.0 for one in made]
        for piece in unit.pieces:
            piece.held.data.add_(1.0)
        unit.free()
        taken: list[str] = []
        rooms.take = lambda name, shape, dtype: taken.append(name)  # type: ignore[method-assign, return-value, assignment]  # nobody may ask
        unit.gather()
        return not taken and all(map(torch.equal, made, wanted))

    assert in_threads(size, work) == [True] * size


@pytest.mark.parametrize("numel", [FEW, MANY])
@pytest.mark.parametrize("size", [2, 3])
def test_pieces_get_the_sum_whatever_the_buffers_held(size: int, numel: int) -> None:
    """And keep it when the buffers are reused; without any gradient there is none."""

    def work(ranks: Ranks) -> bool:
        unit, (weight, unused), rooms = unit_of(ranks, numel)
        for name in ("rows", "every", "own"):
            rooms.take(name, (2 * numel + 100,), torch.float32).fill_(torch.nan)
        weight.grad = gradient(ranks.everyone.rank)
        unit.reduce()
        for name in ("rows", "every", "own"):
            rooms.take(name, (2 * numel + 100,), torch.float32).fill_(torch.nan)
        total = torch.stack([gradient(rank) for rank in range(size)]).sum(0)
        for piece in unit.pieces:
            found = piece.held.grad
            if piece.name == "unused":
                assert found is None
                continue
            assert found is not None
            assert torch.equal(found, total[piece.start : piece.start + found.numel()])
        return weight.grad is None and unused.grad is None

    def gradient(rank: int) -> Tensor:
        return torch.arange(float(numel)) + rank

    assert in_threads(size, work) == [True] * size


def test_write_through_data_is_detected_and_nan_is_not_mistaken() -> None:
    def work(ranks: Ranks) -> tuple[Any, ...]:
        unit, (weight, _), _ = unit_of(ranks, 5 * MANY)
        for piece in unit.pieces:
            piece.held.data[::7] = torch.nan
        unit.gather()
        for _ in range(16):
            unit.refuse_written()
        weight.data[-1] = 1.0
        said = list[str]()
        for _ in range(16):
            try:
                unit.refuse_written()
            except ConfigError as error:
                said.append(str(error))
        return len(said), *said[:1]

    first, second = in_threads(2, work)
    assert first == (0,)  # no part of its own
    assert second[0]
    assert second[1].startswith("parameter 'weight' is changed by forward()")


def test_unit_bytes_are_those_gathered_at_a_time() -> None:
    """A block is one unit; layers of a container are separate; shared parameters belong to the
    model."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(2, 3), nn.Linear(3, 2)

    tied = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Sequential(nn.ReLU(), Block()))
    tied.append(nn.Linear(4, 4, bias=False))
    tied[2].weight = tied[0].weight
    assert unit_bytes(tied) == (64, 4 * (9 + 8))
