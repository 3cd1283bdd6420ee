"""What a model is given, where the text makes the data: shapes of samples, and their tensors.

    data = torch.randn(123, 16); DataLoader(data)      each sample (16,)
    TensorDataset(x, y), OwnDataset(image, mask)       the first is the input, the second the target

This module must not know rules.
"""

from typing import NamedTuple

import libcst as cst

from ..porting.tree import positional
from .facts import Facts
from .layers import Chain
from .values import shape, single


class Given(NamedTuple):
    """What a model is given.

    Attributes:
        call: where.
        input, target: sizes with the number of samples first; None: not said.
        data: what makes the input, and ``target_data`` the target.
    """

    call: cst.Call
    input: tuple[int, ...]
    data: cst.BaseExpression
    target: tuple[int, ...] | None = None
    target_data: cst.BaseExpression | None = None


def given_to(facts: Facts, chain: Chain) -> list[Given]:
    """Each call of the network of a chain with an input that the text makes."""
    found: list[Given] = []
    for call in facts.forward_calls():
        made = facts.made(call.func)
        if len(made) != 1 or made[0] is not chain.node:
            continue  # a name that is bound to several networks is none for certain
        listed = positional(call)
        if len(listed) != 1:
            continue
        own = shape(facts.flow, listed[0])
        if own is not None:
            found.append(Given(call, own, single(facts.flow, listed[0])))
            continue
        found += (Given(call, *one) for one in _from_loader(facts, listed[0]) if one is not None)
    return found


def _from_loader(
    facts: Facts, given: cst.BaseExpression
) -> list[
    tuple[tuple[int, ...], cst.BaseExpression, tuple[int, ...] | None, cst.BaseExpression | None]
]:
    """The data behind a loader, or behind the first name that a loop over one gives."""
    loaders = facts.loaders_of(given)
    name = facts.code(given)
    for loop in facts.script.up(given):
        if isinstance(loop, cst.For) and not loaders:
            targets = [
                facts.code(one.value) for one in loop.target.elements
            ] if isinstance(loop.target, cst.Tuple) else [facts.code(loop.target)]  # fmt: skip
            if targets and targets[0] == name:
                loaders = facts.loaders_of_loop(loop)
    found = []
    for loader in loaders:
        parts = _parts(facts, loader)
        sizes = [shape(facts.flow, one) for one in parts]
        if sizes and sizes[0] is not None:
            second = (sizes[1], parts[1]) if len(parts) > 1 else (None, None)
            found.append((sizes[0], single(facts.flow, parts[0]), *second))
    return found


def _parts(facts: Facts, loader: cst.Call) -> list[cst.BaseExpression]:
    """The tensors that a loader's data are made of."""
    data = facts.data_of(loader)
    if data is None:
        return []
    if shape(facts.flow, data) is not None:
        return [data]
    made = single(facts.flow, data)
    return positional(made) if isinstance(made, cst.Call) else []


def num_samples(facts: Facts, loader: cst.Call) -> int | None:
    """How many samples a loader goes over; None: the text does not say it."""
    parts = _parts(facts, loader)
    sizes = {one[0] for one in (shape(facts.flow, part) for part in parts) if one}
    return sizes.pop() if len(sizes) == 1 else None
