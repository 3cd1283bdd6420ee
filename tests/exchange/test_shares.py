"""Every byte of the parameters is in one member's share; a share can be restored."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from paceline.exchange import share_chunks
from paceline.exchange.share_chunks import ShareChunk
from paceline.exchange.shares import Share, split_shares
from paceline.replica.replica import Replica
from paceline.store.control import Control, control_bytes
from paceline.store.fragments import Fragments
from paceline.store.memory import PrivateMemory
from paceline.store.optimizer import Updater
from paceline.store.parameter_store import SharedStore, arena_bytes

NUM_MEMBERS = 3


class OwnSGD(torch.optim.SGD):
    """An optimizer that may not be elementwise."""


def rig(
    kind: type[torch.optim.SGD], num: int = NUM_MEMBERS
) -> tuple[SharedStore, Replica, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 7).double())
    rule = kind(model.parameters(), lr=0.5, momentum=0.9)
    replica = Replica(model, rule, rule)
    control = Control(PrivateMemory(control_bytes(num)), num)
    memory = PrivateMemory(arena_bytes(replica.layout, num))
    store = SharedStore(replica.layout, memory.tensor(), control)
    replica.write_to(store.blocks[0])
    return store, replica, rule


def stepped(rule: torch.optim.Optimizer, present: bytes) -> Callable[[ShareChunk], None]:
    return lambda chunk: chunk.step(present, rule.param_groups)


@pytest.mark.parametrize("kind", [torch.optim.SGD, OwnSGD])
@pytest.mark.parametrize("num_members", [1, 3, 50])
def test_each_parameter_byte_is_in_one_share(kind: type[torch.optim.SGD], num_members: int) -> None:
    _, replica, rule = rig(kind)
    whole = [Fragments(replica.layout.parameters, 1).whole]
    shares = split_shares(replica.layout, rule, num_members, whole)
    assert len(shares) == num_members
    held = sorted(at for share in shares for run in share for at in range(run.start, run.stop))
    assert len(held) == len(set(held))
    for place in replica.layout.parameters.places:
        assert {*range(place.offset, place.offset + place.num_bytes)} <= set(held)


@pytest.mark.parametrize("kind", [torch.optim.SGD, OwnSGD])
def test_shares_together_make_one_members_update(kind: type[torch.optim.SGD]) -> None:
    store, replica, rule = rig(kind)
    present = b"\1" * len(replica.parameters)
    for seat in range(NUM_MEMBERS):
        for place in replica.layout.parameters.places:
            place.view(store.slot(seat)).copy_(torch.randn(place.shape))
    expected = store.blocks[0].clone()
    mean = torch.zeros_like(store.slot(0))
    for place in replica.layout.parameters.places:
        parts = [place.view(store.slot(seat)) for seat in range(NUM_MEMBERS)]
        place.view(mean).copy_(sum(part / NUM_MEMBERS for part in parts))
    Updater(rule, replica.parameters, replica.layout, expected).step(
        mean, present, rule.param_groups
    )
    parts = Fragments(replica.layout.parameters, 1)
    shares = [Share(store, replica, rule, parts, seat=seat, block=0) for seat in range(NUM_MEMBERS)]
    before = store.blocks[0].clone()
    for share in shares:
        share.update(1, stepped(rule, present), weights=[1 / NUM_MEMBERS] * NUM_MEMBERS)
    for place in replica.layout.parameters.places:
        result = place.view(store.blocks[0])
        assert torch.allclose(result, place.view(expected), atol=1e-6)
    for share in shares:
        share.restore(1)
        share.restore(1)  # by a survivor once more: it is no longer marked
    section = replica.layout.parameters
    assert torch.equal(section.of(store.blocks[0]), section.of(before))


def test_a_lone_member_steps_on_its_own_gradient_and_writes_nothing_else() -> None:
    store, replica, rule = rig(torch.optim.SGD, 1)
    for place in replica.layout.parameters.places:
        place.view(store.slot(0)).copy_(torch.randn(place.shape))
    expected, present = store.blocks[0].clone(), b"\1" * len(replica.parameters)
    Updater(rule, replica.parameters, replica.layout, expected).step(
        store.slot(0), present, rule.param_groups
    )
    share = Share(store, replica, rule, Fragments(replica.layout.parameters, 1), seat=0, block=0)
    assert share.average([1.0]) > 0
    share.update(1, stepped(rule, present))
    assert torch.equal(store.blocks[0], expected)
    assert not store.blocks[1].any()
    assert not store.sum_slot.any()
    place = replica.layout.parameters.places[0]
    place.view(store.slot(0))[0, 0] = torch.nan
    assert not math.isfinite(share.average([1.0]))


def test_a_death_between_chunks_can_be_restored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(share_chunks, "CHUNK_BYTES", 256)
    store, replica, rule = rig(torch.optim.SGD)
    present = b"\1" * len(replica.parameters)
    for seat in range(NUM_MEMBERS):
        for place in replica.layout.parameters.places:
            place.view(store.slot(seat)).copy_(torch.randn(place.shape))
    store.blocks[1].fill_(1)  # of an update before this one
    parts = Fragments(replica.layout.parameters, 1)
    weights, step, stepped_on = [1 / NUM_MEMBERS] * NUM_MEMBERS, stepped(rule, present), list[int]()

    def die_in_the_third(chunk: ShareChunk) -> None:
        step(chunk)
        stepped_on.append(chunk.at)
        if len(stepped_on) == 3:
            raise KeyboardInterrupt

    dead, survivor = (Share(store, replica, rule, parts, seat=1, block=0) for _ in range(2))
    dead.update(1, step, weights=weights)
    before = store.blocks[0].clone()
    with pytest.raises(KeyboardInterrupt):
        dead.update(2, die_in_the_third, weights=weights)
    assert not torch.equal(store.blocks[0], before)
    survivor.restore(2)
    assert torch.equal(store.blocks[0], before)


def test_an_update_in_chunks_equals_an_update_of_the_whole_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    results = []
    for size in (1 << 20, 192):
        monkeypatch.setattr(share_chunks, "CHUNK_BYTES", size)
        store, replica, rule = rig(torch.optim.SGD)
        present = b"\1" * len(replica.parameters)
        parts = Fragments(replica.layout.parameters, 1)
        shares = [Share(store, replica, rule, parts, seat=seat, block=0) for seat in range(2)]
        rng = torch.Generator().manual_seed(5)
        for mark in range(1, 4):
            for seat in range(NUM_MEMBERS):
                for place in replica.layout.parameters.places:
                    drawn = torch.randn(place.shape, generator=rng)
                    place.view(store.slot(seat)).copy_(drawn)
            for share in shares:
                assert share.update(mark, stepped(rule, present), weights=[0.5, 0.25, 0.25]) > 0
        results.append(store.blocks[0].clone())
    assert torch.equal(*results)
