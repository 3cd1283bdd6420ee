"""Which operations a module has, and which of them must stay together.

    torch.fx      each call in the module's own code, a layer of torch's being one; a submodule
                  whose code cannot be followed is kept whole, and named with the line that says why
    torch.export  where the module, or one in it, cannot be followed by torch.fx; sizes are fixed
    children      where neither can: submodules that are called one after the other, each once, for
                  all of several inputs; the code between them is left out, and named
    whole         where nothing can: one piece, which no cut divides

What is found computes what the module computes, on an example and in the mode that the module is
in; the module is left as it was.
"""

import contextlib
import inspect
import io
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..errors import ConfigError
from ..system.reasons import reason
from .pieces import Pieces


@dataclass(frozen=True, slots=True)
class KeptWhole:
    """A submodule that is not looked into, and why, with file and line."""

    name: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedModel:
    """A module as operations.

    Args:
        module: the one that was given.
        graph_module: its operations; parameters keep their names.
        pieces: operations that stay together, in an order in which they can be computed.
        how: ``torch.fx``, ``torch.export``, ``children`` or ``whole``.
        kept: submodules that were not looked into.
        batch_statistics: layers whose training result depends on who else is in the batch.
    """

    module: nn.Module
    graph_module: fx.GraphModule
    pieces: tuple[tuple[fx.Node, ...], ...]
    how: str
    kept: tuple[KeptWhole, ...]
    batch_statistics: tuple[str, ...]

    def piece_of(self) -> dict[fx.Node, int]:
        """The piece of each operation."""
        return {node: number for number, piece in enumerate(self.pieces) for node in piece}

    def parameter_names(self) -> dict[int, str]:
        """Of each parameter and buffer, by its identity; of a tied one the first."""
        named = [*self.module.named_parameters(), *self.module.named_buffers()]
        return {id(one): name for name, one in reversed(named)}


def trace(module: nn.Module, inputs: Sequence[Tensor]) -> TracedModel:
    """The operations of a module for such inputs.

    Raises:
        ConfigError: it does not run on them.
    """
    with untouched(module):
        try:
            with torch.no_grad():
                module(*inputs)
        except Exception as error:  # the user's model may raise anything
            raise ConfigError(f"the model does not run on its inputs: {reason(error)}") from error
        graph_module, how, kept = _operations(module, inputs)
        pieces = Pieces(graph_module)
        with torch.no_grad():
            pieces.run(*inputs)
    return TracedModel(
        module=module,
        graph_module=graph_module,
        pieces=pieces.found(),
        how=how,
        kept=tuple(kept),
        batch_statistics=tuple(
            name
            for name, one in module.named_modules()
            if isinstance(one, nn.modules.batchnorm._BatchNorm) and one.training
        ),
    )


@contextlib.contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """Buffers, gradients and the random generator are afterwards as they were."""
    buffers = {name: one.clone() for name, one in module.named_buffers()}
    grads = [(one, one.grad) for one in module.parameters()]
    with torch.random.fork_rng(devices=[]):
        yield
    with torch.no_grad():
        for name, one in module.named_buffers():
            if name in buffers:
                one.copy_(buffers[name])
    for one, grad in grads:
        one.grad = grad


# -- the operations --------------------------------------------------------------------------------


def _operations(
    module: nn.Module, inputs: Sequence[Tensor]
) -> tuple[fx.GraphModule, str, list[KeptWhole]]:
    """By the first way that follows the module and computes what it computes."""
    followed = _by_fx(module, len(inputs))
    if not isinstance(followed, KeptWhole):
        if not _computes_the_same(module, followed[0], inputs):
            followed = KeptWhole("", "torch.fx follows it to another result")
        elif not followed[1]:
            return followed[0], "torch.fx", []
    with contextlib.suppress(Exception), _quiet():
        exported = torch.export.export(module, tuple(inputs), strict=False)
        made = exported.module(check_guards=False)
        if isinstance(made, fx.GraphModule) and _computes_the_same(module, made, inputs):
            return made, "torch.export", []
    if not isinstance(followed, KeptWhole):
        return followed[0], "torch.fx", followed[1]
    kept = [KeptWhole(type(module).__name__, followed.why)]
    row = _by_children(module, inputs)
    if row is not None and all(_computes_the_same(module, row, one) for one in _others(inputs)):
        return row, "children", kept
    return _as_one(module, len(inputs)), "whole", kept


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What torch.export cannot export it prints and logs, page by page."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)


class _Tracer(fx.Tracer):
    """Follows a module but for some submodules, and knows in which one it was when it failed."""

    def __init__(self, leaves: Iterable[str]) -> None:
        super().__init__()
        self.leaves = set(leaves)
        self.failed_in: str | None = None
        self._stack: list[str] = [""]

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name in self.leaves or super().is_leaf_module(
            m, module_qualified_name
        )

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        name = self.path_of_module(m)
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:  # raised again: only the place is noted
            if self.failed_in is None:
                self.failed_in = name
            raise


def _by_fx(
    module: nn.Module, num_inputs: int
) -> tuple[fx.GraphModule, list[KeptWhole]] | KeptWhole:
    """The operations, with submodules that cannot be followed; or why the module itself cannot."""
    kept: list[KeptWhole] = []
    while True:
        tracer = _Tracer(one.name for one in kept)
        try:
            graph = tracer.trace(module, _constants(module, num_inputs))
            _drop_constants(graph, num_inputs)
            return fx.GraphModule(tracer.root, graph), kept
        except Exception as error:  # torch.fx raises whatever the user's code raises
            name, why = tracer.failed_in or "", reason(error)
        if not name or any(one.name == name for one in kept):
            return KeptWhole("", why)
        kept.append(KeptWhole(name, why))


def _constants(module: nn.Module, num_inputs: int) -> dict[str, Any]:
    """The defaults of arguments that nobody gives."""
    parameters = [
        one
        for one in inspect.signature(module.forward).parameters.values()
        if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
    ]
    rest = parameters[num_inputs:]
    return {one.name: one.default for one in rest if one.default is not one.empty}


def _drop_constants(graph: fx.Graph, num_inputs: int) -> None:
    """Without the inputs that are constants, and what torch.fx asserts of them."""

    def drop(node: fx.Node) -> None:
        for user in list(node.users):
            drop(user)
        graph.erase_node(node)

    given = [node for node in graph.nodes if node.op == "placeholder"]
    for node in given[num_inputs:]:
        drop(node)


def _others(inputs: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """Inputs at which code that branches on them may go another way."""
    for change in (1, -1, 0, 0.37, 1.9, -7.3, 100, -1e4):
        yield tuple(one * change if one.is_floating_point() else one.flip(0) for one in inputs)


def _by_children(module: nn.Module, inputs: Sequence[Tensor]) -> fx.GraphModule | None:
    """Children that are called one after the other, each once, with what the one before gave."""
    calls: list[tuple[str, Any, Any]] = []
    handles = [
        child.register_forward_hook(lambda _, args, out, name=name: calls.append((name, args, out)))
        for name, child in module.named_children()
    ]
    try:
        with torch.no_grad():
            result = module(*inputs)
    finally:
        for handle in handles:
            handle.remove()
    given: Any = inputs[0] if len(inputs) == 1 else None
    for _, args, out in calls:
        if len(args) != 1 or args[0] is not given:
            return None
        given = out
    names = [name for name, _, _ in calls]
    if not calls or given is not result or len(set(names)) < len(names):
        return None
    graph = fx.Graph()
    at = graph.placeholder("inputs")
    for name in names:
        at = graph.call_module(name, (at,))
    graph.output(at)
    return fx.GraphModule(module, graph)


class WholeModel(nn.Module):
    """A module that is one operation."""

    def __init__(self, whole: nn.Module) -> None:
        super().__init__()
        self.whole = whole


def _as_one(module: nn.Module, num_inputs: int) -> fx.GraphModule:
    graph = fx.Graph()
    given = tuple(graph.placeholder(f"input_{number}") for number in range(num_inputs))
    graph.output(graph.call_module("whole", given))
    return fx.GraphModule(WholeModel(module), graph)


def _computes_the_same(module: nn.Module, other: nn.Module, inputs: Sequence[Tensor]) -> bool:
    """Whether both give the same for the example, with the same random state."""
    results = []
    for one in (module, other):
        with untouched(module), torch.no_grad():
            torch.manual_seed(0)
            try:
                given = one(*(tensor.clone() for tensor in inputs))
            except Exception:  # a traced graph that raises is not the same
                return False
            results.append(torch.utils._pytree.tree_leaves(given))
    ours, theirs = ([x for x in one if isinstance(x, Tensor)] for one in results)
    if len(ours) != len(theirs) or not ours:
        return False
    if any(one.is_meta for one in ours):
        return all(a.shape == b.shape for a, b in zip(ours, theirs, strict=True))
    return all(
        a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)
        for a, b in zip(ours, theirs, strict=True)
    )
