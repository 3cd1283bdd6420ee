"""The price of compression: what a link saves, what encoding costs, what is not in the bytes."""

import time

import pytest
import torch
from torch import Tensor, nn

from compressing import example
from paceline.collectives.base import LinkCost
from paceline.compression import parse
from paceline.exchange.compressed import CompressedGradient, GroupLink
from paceline.exchange.group import MemberGroup, Pending
from paceline.exchange.priced import MadeUpGradients, price_alone, price_between
from paceline.store.layout import lay_out

EACH_S = 1e-3
SLOW_SUM_S = 10e-3
QUICK = LinkCost(latency_s=1e-9, s_per_byte=1e-9)


def made(name: str) -> CompressedGradient:
    """The compressed gradient of one of two members, with two dtypes."""
    compression = parse(example(name))
    assert compression is not None
    model = nn.Sequential(nn.Linear(8, 40), nn.Linear(40, 16).to(torch.bfloat16))
    section = lay_out(model.named_parameters(), [], []).parameters
    return CompressedGradient(compression, section, 0, 2, torch.device("cpu"))


class SlowToBegin(MemberGroup):
    """Two equal members, between which an operation takes a millisecond, whatever its bytes."""

    rank, size = 0, 2

    def wait(self) -> None:
        time.sleep(EACH_S)

    def all_reduce(
        self, tensor: Tensor, *, is_maximum: bool = False, at_once: bool = False
    ) -> Pending:
        return self

    def all_gather(self, mine: Tensor, out: Tensor) -> Pending:
        out.copy_(mine.repeat(2))
        return self

    def all_to_all(self, mine: Tensor, out: Tensor) -> Pending:
        out.copy_(mine)
        return self


class SlowInHalves(SlowToBegin):
    """It sums 16-bit numbers as gloo does: slower than twice as many of 32 bits."""

    def all_reduce(
        self, tensor: Tensor, *, is_maximum: bool = False, at_once: bool = False
    ) -> Pending:
        if tensor.dtype is torch.float16:
            time.sleep(SLOW_SUM_S)
        return self


def test_without_a_link_only_the_time_spent_is_known() -> None:
    price = price_alone(made("int8"))
    assert price.wins is None
    assert price.spent_s > 0.0
    assert price.sent_bytes < 0.5 * price.plain_bytes


def test_a_slow_link_is_priced_by_bytes() -> None:
    slow, link = LinkCost(latency_s=1e-3, s_per_byte=1e-3), GroupLink(SlowToBegin())
    began_s = time.perf_counter()
    price = MadeUpGradients(made("int8")).price_on(link, slow, lambda: None)
    assert price.plain_s is not None
    assert price.plain_s > time.perf_counter() - began_s  # it was not awaited
    assert price.wins
    assert "compressing wins here" in price.render()


def test_costs_that_do_not_depend_on_bytes_are_measured_on_a_fast_link() -> None:
    link = GroupLink(SlowInHalves())
    price = MadeUpGradients(made("fp16")).price_on(link, QUICK, lambda: None)
    assert price.plain_s is not None
    assert price.sent_s is not None
    assert price.sent_bytes < price.plain_bytes
    assert price.sent_s > price.plain_s + SLOW_SUM_S
    assert not price.wins
    assert "compressing loses here" in price.render()


@pytest.mark.parametrize("name", ["int8", "topk"])
def test_the_price_includes_additional_operations(name: str) -> None:
    compressed = made(name)
    count = len(compressed.spans(compressed.largest))
    each = 2 if name == "int8" else 1  # it is swapped, then gathered; or gathered at once
    price = price_between(SlowToBegin(), compressed)
    with_lines = price_between(SlowToBegin(), compressed, line_bytes=64)
    assert price.plain_s is not None
    assert price.sent_s is not None
    assert with_lines.sent_s is not None
    assert price.plain_s >= count * EACH_S  # an all-reduce for each type of numbers
    assert price.sent_s + price.spent_s >= each * count * EACH_S
    assert with_lines.sent_s + with_lines.spent_s >= (each * count + 1) * EACH_S
    assert price.wins is (price.plain_s - price.sent_s > price.spent_s)
    assert not compressed.remember()["residual"][0].any()  # nothing of it was sent
