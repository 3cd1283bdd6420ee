"""The inputs of a model where the script itself makes the data: their shapes and their tensors.

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


class ModelInput(NamedTuple):
    """The data that a call of a model gets.

    Attributes:
        call: the call of the model.
        input: sizes of all inputs, the number of samples first.
        data: the expression that makes the inputs.
        target: sizes of all targets, the number of samples first; None where unknown.
        target_data: the expression that makes the targets; None where unknown.
    """

    call: cst.Call
    input: tuple[int, ...]
    data: cst.BaseExpression
    target: tuple[int, ...] | None = None
    target_data: cst.BaseExpression | None = None


def inputs_of(facts: Facts, chain: Chain) -> list[ModelInput]:
    """Return the inputs of each call of a chain's network, where the script makes them."""
    inputs: list[ModelInput] = []
    for call in facts.forward_calls():
        constructors = facts.constructors(call.func)
        if len(constructors) != 1 or constructors[0] is not chain.node:
            continue  # a name that is bound to several networks is none of them for certain
        arguments = positional(call)
        if len(arguments) != 1:
            continue
        sizes = shape(facts.flow, arguments[0])
        if sizes is not None:
            inputs.append(ModelInput(call, sizes, single(facts.flow, arguments[0])))
            continue
        inputs += (ModelInput(call, *data) for data in _from_loader(facts, arguments[0]))
    return inputs


def _from_loader(
    facts: Facts, argument: cst.BaseExpression
) -> list[
    tuple[tuple[int, ...], cst.BaseExpression, tuple[int, ...] | None, cst.BaseExpression | None]
]:
    """Return ``input, data, target, target_data`` for each loader that an argument comes from.

    The argument is a loader itself, or the first loop variable of a loop over a loader.
    """
    loaders = facts.loaders_of(argument)
    name = facts.code(argument)
    for loop in facts.script.up(argument):
        if isinstance(loop, cst.For) and not loaders:
            targets = [
                facts.code(element.value) for element in loop.target.elements
            ] if isinstance(loop.target, cst.Tuple) else [facts.code(loop.target)]  # fmt: skip
            if targets and targets[0] == name:
                loaders = facts.loaders_of_loop(loop)
    inputs = []
    for loader in loaders:
        parts = _parts(facts, loader)
        sizes = [shape(facts.flow, part) for part in parts]
        if sizes and sizes[0] is not None:
            target = (sizes[1], parts[1]) if len(parts) > 1 else (None, None)
            inputs.append((sizes[0], single(facts.flow, parts[0]), *target))
    return inputs


def _parts(facts: Facts, loader: cst.Call) -> list[cst.BaseExpression]:
    """Return the tensors that a loader's data set is made of."""
    data = facts.data_of(loader)
    if data is None:
        return []
    if shape(facts.flow, data) is not None:
        return [data]
    dataset = single(facts.flow, data)
    return positional(dataset) if isinstance(dataset, cst.Call) else []


def num_samples(facts: Facts, loader: cst.Call) -> int | None:
    """Return how many samples a loader has, or None where the text does not say it."""
    shapes = [shape(facts.flow, part) for part in _parts(facts, loader)]
    lengths = {sizes[0] for sizes in shapes if sizes}
    return lengths.pop() if len(lengths) == 1 else None
