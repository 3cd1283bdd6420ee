"""Lines that go with a bucket of gradients: every byte comes back, of whatever type they are."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.engines.torchrun.buckets import LinesAlong
from paceline.exchange.compressed import Span

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", FLOATS)
@given(lines=st.lists(st.binary(min_size=24, max_size=24), min_size=1, max_size=5))
def test_lines_and_gradients_of_all_are_one_sum(dtype: torch.dtype, lines: list[bytes]) -> None:
    bucket = Span(0, 8 * dtype.itemsize, dtype)
    ranks = [LinesAlong(24 * len(lines), bucket, 256) for _ in lines]
    for seat, (one, line) in enumerate(zip(ranks, lines, strict=True)):
        bucket.of(one.mean).fill_(1.0)
        one.put(seat, torch.frombuffer(bytearray(line), dtype=torch.uint8))
    total = torch.stack([one.whole for one in ranks]).sum(0)
    for one in ranks:
        one.whole.copy_(total)
        every = torch.empty(24 * len(lines), dtype=torch.uint8)
        one.read(every)
        assert bytes(every.tolist()) == b"".join(lines)
        assert bucket.of(one.mean).tolist() == [float(len(lines))] * 8
        assert not one.mean[bucket.stop :].any()


def test_what_does_not_fit_goes_by_itself() -> None:
    assert LinesAlong.fits(1000, Span(0, 64, torch.float32))
    assert not LinesAlong.fits(100_000, Span(0, 64, torch.float32))
    assert not LinesAlong.fits(1000, Span(64, 128, torch.float32))
    assert not LinesAlong.fits(1000, Span(0, 64, torch.complex64))
