"""A pending mean: what it contains, and that nothing else is changed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.compression import parse
from paceline.exchange.compressed import CompressedGradient
from paceline.exchange.late import LateMean
from paceline.store.fragments import Fragments
from paceline.store.layout import lay_out


class Done:
    """An operation that completes when it is awaited."""

    def __init__(self, finish: Callable[[], Any]) -> None:
        self.wait = finish


class Alone:
    """A group whose other member sends the same, and which counts started operations."""

    rank, size = 0, 2

    def __init__(self) -> None:
        self.begun, self.over = 0, 0

    def _begin(self, change: Callable[[], Any]) -> Done:
        self.begun += 1

        def finish() -> None:
            change()
            self.over += 1

        return Done(finish)

    def all_reduce(
        self, tensor: Tensor, *, is_maximum: bool = False, at_once: bool = False
    ) -> Done:
        return self._begin(lambda: tensor.mul_(2))

    def all_gather(self, mine: Tensor, out: Tensor) -> Done:
        return self._begin(lambda: out.view(2, -1).copy_(mine.view(-1)))

    def all_to_all(self, mine: Tensor, out: Tensor) -> Done:
        return self._begin(lambda: out.copy_(mine[: len(mine) // 2].repeat(2)))


def rig(compress: str = "none") -> tuple[LateMean, Alone, Fragments, list[Tensor]]:
    named = [(str(one), nn.Parameter(torch.zeros(40))) for one in range(2)]
    section = lay_out(named, [], []).parameters
    mean = torch.zeros(section.stop, dtype=torch.uint8)
    views = [place.view(mean) for place in section.places]
    for number, view in enumerate(views, start=1):
        view.fill_(float(number))
    compression, compressed = parse(compress), None
    if compression is not None:
        compressed = CompressedGradient(compression, section, 0, 2, torch.device("cpu"), 2)
    group = Alone()
    late = LateMean(group, section, mean, compressed)  # type: ignore[arg-type]
    return late, group, Fragments(section, 2), views


def test_only_the_due_fragment_is_summed_and_awaited_when_needed() -> None:
    late, group, fragments, views = rig()
    assert late.finish() is None
    late.begin(fragments.each[1], 0.25)
    late.go_on()
    assert (group.begun, group.over) == (1, 0), "a sum is waited for when it is needed"
    assert late.finish() is fragments.each[1]
    assert [float(view[0]) for view in views] == [1.0, 2 * 2 * 0.25]
    assert late.finish() is None


def test_a_member_without_a_part_sends_zeros() -> None:
    late, _, fragments, views = rig()
    late.begin(fragments.each[0], 0.0)
    late.finish()
    assert [float(view[0]) for view in views] == [0.0, 2.0]


@pytest.mark.parametrize("compress", ["int8", "int4"])
def test_a_second_operation_starts_halfway(compress: str) -> None:
    late, group, fragments, views = rig(compress)
    late.begin(fragments.each[0], 0.5)
    assert (group.begun, group.over) == (1, 0)
    late.go_on()
    assert (group.begun, group.over) == (2, 1)
    assert late.finish() is fragments.each[0]
    assert float((views[0] - 1.0).abs().max()) < 1e-6
    assert float((views[1] - 2.0).abs().max()) == 0.0
