"""Lines sent with a bucket of gradients: every byte comes back, for every dtype."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.engines.torchrun.buckets import Bucket, LinesAlong
from paceline.exchange.compressed import Span


def own_zeros(num_bytes: int) -> torch.Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8)


FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", FLOATS)
@given(lines=st.lists(st.binary(min_size=24, max_size=24), min_size=1, max_size=5))
def test_lines_and_gradients_of_all_ranks_are_one_sum(
    dtype: torch.dtype, lines: list[bytes]
) -> None:
    bucket = Span(0, 8 * dtype.itemsize, dtype)
    ranks = [LinesAlong(24 * len(lines), bucket, 256, own_zeros) for _ in lines]
    for seat, (one, line) in enumerate(zip(ranks, lines, strict=True)):
        bucket.of(one.mean).fill_(1.0)
        one.put(seat, torch.frombuffer(bytearray(line), dtype=torch.uint8))
    total = torch.stack([rank.whole for rank in ranks]).sum(0)
    for rank in ranks:
        rank.whole.copy_(total)
        every = torch.empty(24 * len(lines), dtype=torch.uint8)
        rank.read(every)
        assert bytes(every.tolist()) == b"".join(lines)
        assert bucket.of(rank.mean).tolist() == [float(len(lines))] * 8
        assert not rank.mean[bucket.stop :].any()


def test_a_bucket_is_multiplied_as_a_whole() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(3, 2)) for _ in range(3)]
    block = torch.full((18,), 7.0)
    views = [part.view(3, 2) for part in block.split(6)]
    parameters[0].grad, parameters[2].grad = torch.ones(3, 2), torch.arange(6.0).view(2, 3).t()
    bucket = Bucket(Span(0, 72, torch.float32), (0, 1, 2))
    bucket.multiply(parameters, views, 0.25)
    assert torch.equal(views[0], torch.full((3, 2), 0.25))
    assert not views[1].any()
    assert torch.equal(views[2], torch.arange(6.0).view(2, 3).t() / 4)
    assert torch.equal(parameters[2].grad, torch.arange(6.0).view(2, 3).t())
    parameters[0].grad = parameters[2].grad = None
    bucket.multiply(parameters, views, 0.5)
    assert not block.any()


def test_lines_that_do_not_fit_a_bucket_are_sent_separately() -> None:
    assert LinesAlong.fits(1000, Span(0, 64, torch.float32))
    assert not LinesAlong.fits(100_000, Span(0, 64, torch.float32))
    assert not LinesAlong.fits(1000, Span(64, 128, torch.float32))
    assert not LinesAlong.fits(1000, Span(0, 64, torch.complex64))
