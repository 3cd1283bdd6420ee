"""Gradients that a script keeps over the next pass are unchanged, as in plain PyTorch."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import ConfigError
from paceline.replica.edits import Edits
from paceline.replica.lent import LentPlaces
from paceline.replica.replica import Replica
from paceline.replica.set_aside import SetAside
from paceline.store.joint import joined

KEEPS: dict[str, Callable[[Tensor], Any]] = {
    "the tensor": lambda one: one,
    "a part of its memory": lambda one: one.detach().view(-1)[:1],
    ".data": lambda one: one.data,
    "both": lambda one: (one, one.view(-1)),
}


def made() -> tuple[Replica, Tensor]:
    """A replica whose gradients are gathered, and their slot."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    member = Replica(model, optimizer, optimizer)
    slot = torch.zeros(member.layout.slot_bytes, dtype=torch.uint8)
    member.push_into(slot, lambda: None)
    return member, slot


def differentiate(member: Replica, factor: float, **options: bool) -> None:
    """The loss's gradient is linear in the factor."""
    member.model.zero_grad()
    (factor * member.model(torch.ones(1, 3, dtype=torch.float64)).sum()).backward(**options)


def pushed(member: Replica, slot: Tensor) -> list[Tensor]:
    """The gradients pushed now."""
    member.collect(memoryview(bytearray(len(member.parameters))))
    return [place.view(slot).clone() for place in member.layout.parameters.places]


def are_gathered(member: Replica, slot: Tensor) -> bool:
    """Whether each ``.grad`` is in the slot that is pushed."""
    places = [place.view(slot) for place in member.layout.parameters.places]
    grads = [parameter.grad for parameter in member.parameters]
    return all(
        grad is not None and grad.data_ptr() == place.data_ptr()
        for grad, place in zip(grads, places, strict=True)
    )


def are_equal(some: list[Tensor], others: list[Tensor], factor: float = 1.0) -> bool:
    return all(torch.equal(factor * a, b) for a, b in zip(some, others, strict=True))


@pytest.mark.parametrize("how", KEEPS)
def test_kept_gradients_are_unchanged_and_new_ones_are_pushed(how: str) -> None:
    member, slot = made()
    differentiate(member, 1.0)
    first = pushed(member, slot)
    kept = [KEEPS[how](parameter.grad) for parameter in member.parameters]  # type: ignore[arg-type]  # they are there
    tensors = [part for row in kept for part in (row if isinstance(row, tuple) else (row,))]
    before = [part.clone() for part in tensors]
    for factor in (2.0, 4.0):
        differentiate(member, factor)
        later = [parameter.grad for parameter in member.parameters]
        assert are_equal(first, pushed(member, slot), factor)
        assert are_equal(tensors, before)
    differentiate(member, 8.0)
    assert are_equal(first, later, 4.0)  # type: ignore[arg-type]  # the same


def test_unkept_gradients_are_gathered_without_a_copy() -> None:
    member, slot = made()
    for _ in range(3):
        differentiate(member, 1.0)
        assert sum(float(parameter.grad.view(-1).norm()) for parameter in member.parameters) > 0  # type: ignore[union-attr]  # the same
        assert are_gathered(member, slot)
        pushed(member, slot)


def test_a_kept_gradient_is_not_zeroed_by_a_push_without_it() -> None:
    member, slot = made()
    differentiate(member, 1.0)
    kept = member.parameters[0].grad
    assert kept is not None
    before, member.parameters[0].grad = kept.clone(), None
    assert not pushed(member, slot)[0].any()
    assert torch.equal(kept, before)


def test_a_kept_gradient_is_not_overwritten_by_a_replacement() -> None:
    member, slot = made()
    edits = Edits(member, is_refused=True)
    differentiate(member, 1.0)
    edits.after_backward()
    kept = member.parameters[0].grad
    assert kept is not None
    before = kept.clone()
    with edits.allowed():
        member.parameters[0].grad = kept * 3.0
    assert torch.equal(pushed(member, slot)[0], 3.0 * before)
    assert torch.equal(kept, before)


@pytest.mark.parametrize("change", [lambda one: one.mul_(0.5), lambda one: one.data.mul_(0.5)])
def test_changes_of_kept_gradients_are_found(change: Callable[[Tensor], Tensor]) -> None:
    member, _ = made()
    edits = Edits(member, is_refused=True)
    for _ in range(2):
        edits.before_backward()
        differentiate(member, 1.0)
        edits.after_backward()
        kept = [parameter.grad for parameter in member.parameters]
        edits.check()
    assert kept[0] is not None
    change(kept[0])
    with pytest.raises(ConfigError, match="changed between backward"):
        edits.check()


class Token:
    """Part of the graph of a pass."""


def differentiate_twice(member: Replica, token: Token) -> list[Tensor]:
    """The product of the Hessian with ones, computed from ``.grad``."""
    member.model.zero_grad()
    outputs = member.model(torch.ones(1, 3, dtype=torch.float64))
    outputs.register_hook(lambda gradient, token=token: gradient)
    outputs.square().sum().backward(create_graph=True)
    grads: list[Any] = [parameter.grad for parameter in member.parameters]
    ones = [torch.ones_like(grad) for grad in grads]
    return list(torch.autograd.grad(grads, member.parameters, ones))


def test_the_graph_of_a_gradient_is_of_its_own_pass_and_freed_with_it() -> None:
    member, slot = made()
    results, tokens = [], list[Any]()
    for _ in range(3):
        token = Token()
        tokens.append(weakref.ref(token))
        results.append(differentiate_twice(member, token))
        grads: list[Any] = [parameter.grad for parameter in member.parameters]
        assert are_equal([grad.detach() for grad in grads], pushed(member, slot))
        del token, grads
    member.model.zero_grad()
    assert are_equal(results[0], results[1])
    assert [token() for token in tokens] == [None, None, None]


def test_each_of_several_optimizers_pushes_its_own_gradients() -> None:
    model = nn.Linear(1, 1)
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.SGD([parameter], lr=0.1) for parameter in (model.weight, model.bias)
    ]
    both = joined(optimizers)
    member = Replica(model, both, both)
    slot = torch.zeros(member.layout.slot_bytes, dtype=torch.uint8)
    member.push_into(slot, lambda: None)
    aside, kept = SetAside(member, optimizers), []
    for factor in (1.0, 2.0):
        model.zero_grad()
        (factor * (model.weight + 2 * model.bias)).sum().backward()  # type: ignore[no-untyped-call]
        kept += [parameter.grad for parameter in member.parameters]
        for part in range(2):
            with aside.only(part):
                results = [float(value) for value in pushed(member, slot)]
            assert results == [factor * (part == 0), 2 * factor * (part == 1)]
    assert [float(grad) for grad in kept] == [1.0, 2.0, 2.0, 4.0]  # type: ignore[arg-type]  # the same


def test_references_to_a_place_are_counted() -> None:
    member, _ = made()
    places = [place.alone(member.outgoing) for place in member.layout.parameters.places]
    lent = LentPlaces(places)
    for number in range(len(places)):
        lent.add(places[number])
    assert not any(lent.is_held(number) for number in range(len(places)))
    held = places[0], places[1].view(-1)
    assert [lent.is_held(number) for number in range(len(places))] == [True, True, False, False]
    del held
    assert not any(lent.is_held(number) for number in range(len(places)))
