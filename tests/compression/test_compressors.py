"""Properties of every compressor of the table."""

import math

import pytest
import torch

from compressing import Member, example, exchange, make_members
from paceline.compression import COMPRESSORS, parse
from paceline.compression.base import Matrix

SIZE = 2600
MATRICES = (
    Matrix(start=0, rows=40, columns=30, number=0),
    Matrix(start=1264, rows=7, columns=100, number=2),
    Matrix(start=1968, rows=3, columns=2, number=3),
)
"""The last one cannot be made smaller; 1200 to 1264 and from 1974 on are no matrix."""


def members_of(
    name: str, num_members: int, size: int = SIZE, dtype: torch.dtype = torch.float32
) -> list[Member]:
    compression = parse(example(name))
    assert compression is not None
    matrices = MATRICES if size == SIZE else ()
    return make_members(compression, size, num_members, matrices, dtype)


@pytest.mark.parametrize("name", COMPRESSORS)
@pytest.mark.parametrize("num_members", [1, 2, 3, 5])
@pytest.mark.parametrize("size", [1, 7, SIZE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sent_values_and_residuals_sum_to_the_input(
    name: str, num_members: int, size: int, dtype: torch.dtype
) -> None:
    """In each update; a member without a mini-batch still sends its residual."""
    torch.manual_seed(0)
    members = members_of(name, num_members, size, dtype)
    for update in range(8):
        owns = [10 ** (seat - 1) * torch.randn(size, dtype=dtype) for seat in range(num_members)]
        shares = [(1.0 + seat) / sum(range(num_members + 1)) for seat in range(num_members)]
        if update == 3:
            shares[-1] = 0.0
        went_in = sum(
            share * own + one.residual
            for share, own, one in zip(shares, owns, members, strict=True)
        )
        outs, _ = exchange(members, owns, shares)
        for one in members:
            one.keep()
        came_out = outs[0] + sum(member.residual for member in members)
        cut = {"fp16": 2e-3, "bf16": 2e-2}.get(name, 0.0) * (num_members > 1)  # sums of 16 bits
        close = (1e-6 + cut) * float(went_in.abs().max())
        assert float((came_out - went_in).abs().max()) <= close
        assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.parametrize("name", COMPRESSORS)
@pytest.mark.parametrize("num_members", [2, 3, 4])
@pytest.mark.parametrize("size", [5, 1024, SIZE])
def test_sent_bytes_match_the_formula(name: str, num_members: int, size: int) -> None:
    members = members_of(name, num_members, size)
    _, sent = exchange(members, [torch.randn(size)] * num_members, [1.0] * num_members)
    for member, num_bytes in zip(members, sent, strict=True):
        assert math.isclose(member.compressor.sent_bytes(), num_bytes, rel_tol=1e-12)


@pytest.mark.parametrize("name", COMPRESSORS)
def test_compressor_sends_at_most_half_the_bytes(name: str) -> None:
    for member in members_of(name, 2):
        assert member.compressor.sent_bytes() <= 0.5 * 4 * SIZE


@pytest.mark.parametrize("name", COMPRESSORS)
def test_rejected_update_changes_nothing(name: str) -> None:
    torch.manual_seed(1)
    members = members_of(name, 2)
    first, other = ([torch.randn(SIZE), torch.randn(SIZE)] for _ in range(2))
    exchange(members, first, [0.5, 0.5])
    for one in members:
        one.keep()
    before = [member.residual.clone() for member in members]
    again, _ = exchange(members, first, [0.5, 0.5])
    exchange(members, other, [0.5, 0.5])
    assert all(torch.equal(one.residual, was) for one, was in zip(members, before, strict=True))
    after, _ = exchange(members, first, [0.5, 0.5])
    assert torch.equal(after[0], again[0])


@pytest.mark.parametrize("name", COMPRESSORS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nonfinite_value_reaches_every_member(name: str, value: float) -> None:
    members = members_of(name, 3)
    owns = [torch.randn(SIZE) for _ in members]
    owns[1][17] = value
    outs, _ = exchange(members, owns, [1 / 3] * 3)
    assert not any(bool(torch.isfinite(out).all()) for out in outs)


@pytest.mark.parametrize("name", COMPRESSORS)
def test_zeros_stay_zeros_and_do_not_stop_later_updates(name: str) -> None:
    members = members_of(name, 2)
    for _ in range(2):
        outs, _ = exchange(members, [torch.zeros(SIZE)] * 2, [0.5, 0.5])
        assert not outs[0].any()
        for member in members:
            member.keep()
    torch.manual_seed(2)
    same = torch.randn(SIZE)
    total = torch.zeros(SIZE)
    for _ in range(150):  # the mean of all updates of a constant gradient is that gradient
        outs, _ = exchange(members, [same, same], [0.5, 0.5])
        total += outs[0]
        for one in members:
            one.keep()
    assert float((total / 150 - same).norm()) < 0.5 * float(same.norm())


@pytest.mark.parametrize("name", COMPRESSORS)
def test_gradient_may_share_memory_with_the_mean(name: str) -> None:
    torch.manual_seed(3)
    compression = parse(example(name))
    assert compression is not None
    apart, inside = members_of(name, 1), members_of(name, 1)
    own = torch.randn(SIZE)
    (expected,), _ = exchange(apart, [own], [1.0])
    actual = own.clone()
    under_way = inside[0].begin(actual, 1.0, actual)
    asked = next(under_way)
    while True:
        answer = asked.tensor if type(asked).__name__ != "AllGather" else asked.tensor[None]
        try:
            asked = under_way.send(answer)
        except StopIteration:
            break
    assert torch.equal(actual, expected)
