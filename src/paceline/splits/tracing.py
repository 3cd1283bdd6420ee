"""Which operations a module has, and which of them must stay together.

    torch.fx      each call in the module's own code, a layer of torch's being one; a submodule
                  whose code cannot be followed is kept whole, and named with the line that says why
    torch.export  where the module, or one in it, cannot be followed by torch.fx; sizes are fixed
    children      where neither can: submodules that are called one after the other, each once, for
                  all of several inputs; the code between them is left out, and named
    whole         where nothing can: one piece, which no cut divides

What is found computes what the module computes, on an example and in the mode that the module is
in; the module is left as it was. Code that draws random numbers by itself, from Python, NumPy or a
torch function that is given no tensor, is kept whole: followed, it would have drawn them once for
all. Above 300 lines, since what is followed and what is not is read together.
"""

import contextlib
import inspect
import io
import logging
import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from ..errors import ConfigError
from ..system.reasons import reason
from .pieces import Pieces

_DRAWS = "it draws random numbers by itself, and followed it would have drawn them once for all"
_one_at_a_time = threading.Lock()
"""torch.fx changes ``nn.Module`` for the whole process while it follows one."""


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
        again: follows it anew, by torch.fx and as it is now; None: it was followed otherwise.
    """

    module: nn.Module
    graph_module: fx.GraphModule
    pieces: tuple[tuple[fx.Node, ...], ...]
    how: str
    kept: tuple[KeptWhole, ...]
    batch_statistics: tuple[str, ...]
    again: Callable[[], fx.GraphModule] | None = None

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
        graph_module, how, kept, again = _operations(module, inputs)
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
        again=again,
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


class _Followed(NamedTuple):
    """A module as torch.fx follows it."""

    graph_module: fx.GraphModule
    kept: list[KeptWhole]
    again: Callable[[], fx.GraphModule]


_Found = tuple[fx.GraphModule, str, list[KeptWhole], Callable[[], fx.GraphModule] | None]


def _operations(module: nn.Module, inputs: Sequence[Tensor]) -> _Found:
    """By the first way that follows the module and computes what it computes."""
    followed = _by_fx(module, len(inputs))
    if not isinstance(followed, KeptWhole):
        if not _computes_the_same(module, followed.graph_module, inputs):
            followed = KeptWhole("", "torch.fx follows it to another result")
        elif not followed.kept:
            return followed.graph_module, "torch.fx", [], followed.again
    with contextlib.suppress(Exception), _quiet():
        before = generator_states()[1:]
        exported = torch.export.export(module, tuple(inputs), strict=False)
        has_drawn = generator_states()[1:] != before
        made = exported.module(check_guards=False)
        is_graph = isinstance(made, fx.GraphModule) and not has_drawn
        if is_graph and _computes_the_same(module, made, inputs):
            return made, "torch.export", [], None
    if not isinstance(followed, KeptWhole):
        return followed.graph_module, "torch.fx", followed.kept, followed.again
    kept = [KeptWhole(type(module).__name__, followed.why)]
    row = _by_children(module, inputs)
    if row is not None and all(_computes_the_same(module, row, one) for one in _others(inputs)):
        return row, "children", kept, None
    return _as_one(module, len(inputs)), "whole", kept, None


def generator_states() -> tuple[bytes | object, ...]:
    """Of the generators that a module may draw from without saying so: torch's first."""
    states: list[bytes | object] = [torch.get_rng_state().numpy().tobytes(), random.getstate()]
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, *rest = numpy.random.get_state()
        states += [kind, keys.tobytes(), *rest]
    return tuple(states)


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


class _BufferProxy(fx.Proxy):
    """A buffer that is read while a module is followed; of what size and kind it is, is known."""

    def __init__(self, node: fx.Node, tracer: fx.Tracer, buffer: Tensor) -> None:
        super().__init__(node, tracer)
        self.shape, self.ndim, self.dtype = buffer.shape, buffer.ndim, buffer.dtype
        self.device, self.size, self.dim = buffer.device, buffer.size, buffer.dim
        self.numel = buffer.numel

    def __len__(self) -> int:
        return self.shape[0]


class _Tracer(fx.Tracer):
    """Follows a module but for some submodules, and knows in which one it was when it failed.

    Other threads may run modules meanwhile, as those that load data do.

    Args:
        reads_buffers: buffers are what they are whenever the operations run; else numbers.
    """

    def __init__(self, leaves: Iterable[str], *, reads_buffers: bool) -> None:
        super().__init__()
        self.proxy_buffer_attributes = reads_buffers
        self.leaves = set(leaves)
        self.failed_in: str | None = None
        self.drew_in: str | None = None
        self._thread = threading.get_ident()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name in self.leaves or super().is_leaf_module(
            m, module_qualified_name
        )

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, fx.Proxy]) -> Any:
        if threading.get_ident() != self._thread:
            return attr_val
        found = super().getattr(attr, attr_val, parameter_proxy_cache)
        if found is attr_val or isinstance(attr_val, nn.Parameter):
            return found
        return _BufferProxy(found.node, self, attr_val)

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        name, before = self.path_of_module(m), generator_states()
        try:
            found = super().call_module(m, forward, args, kwargs)
        except Exception:  # raised again: only the place is noted
            if self.failed_in is None:
                self.failed_in = name
            raise
        if self.drew_in is None and generator_states() != before:
            self.drew_in = name
        return found


def _by_fx(module: nn.Module, num_inputs: int) -> _Followed | KeptWhole:
    """The operations, with submodules that cannot be followed; or why the module itself cannot.

    Code that branches on a buffer's numbers is followed for what they are, where it has to be.
    """
    constants = _constants(module, num_inputs)
    found = _follow(module, num_inputs, constants, reads_buffers=True)
    if isinstance(found, KeptWhole) or found.kept:
        other = _follow(module, num_inputs, constants, reads_buffers=False)
        if isinstance(found, KeptWhole):
            return other
        if not isinstance(other, KeptWhole) and len(other.kept) < len(found.kept):
            return other
    return found


def _follow(
    module: nn.Module, num_inputs: int, constants: dict[str, Any], *, reads_buffers: bool
) -> _Followed | KeptWhole:
    kept: list[KeptWhole] = []

    def again() -> fx.GraphModule:
        return follow(_Tracer((one.name for one in kept), reads_buffers=reads_buffers))

    def follow(tracer: _Tracer) -> fx.GraphModule:
        with _one_at_a_time, attributes_kept(module):
            graph = tracer.trace(module, constants)
            _drop_constants(graph, num_inputs)
            return fx.GraphModule(tracer.root, graph)

    while True:
        tracer = _Tracer((one.name for one in kept), reads_buffers=reads_buffers)
        before = generator_states()
        try:
            made = follow(tracer)
            if generator_states() == before:
                return _Followed(made, kept, again)
            name, why = tracer.drew_in or "", _DRAWS
        except Exception as error:  # torch.fx raises whatever the user's code raises
            name, why = tracer.failed_in or "", reason(error)
        if not name or any(one.name == name for one in kept):
            return KeptWhole("", why)
        kept.append(KeptWhole(name, why))


@contextlib.contextmanager
def attributes_kept(module: nn.Module) -> Iterator[None]:
    """What code sets on modules while it is followed is afterwards as it was."""
    before = [(vars(one), dict(vars(one))) for one in module.modules()]
    try:
        yield
    finally:
        for now, kept in before:
            for name in [one for one in now if one not in kept]:
                del now[name]
            now.update(kept)


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
    states = [generator_states()]

    def note(_: nn.Module, args: Any, out: Any, name: str) -> None:
        calls.append((name, args, out))
        states.append(generator_states())

    handles = []
    for name, child in module.named_children():
        handles.append(child.register_forward_hook(partial(note, name=name)))
        handles.append(
            child.register_forward_pre_hook(lambda *_: states.append(generator_states()))
        )
    try:
        with torch.no_grad():
            result = module(*inputs)
    finally:
        for handle in handles:
            handle.remove()
    states.append(generator_states())
    if states[::2] != states[1::2]:  # between its children the module draws by itself
        return None
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
