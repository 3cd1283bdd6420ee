"""Trace the operations of a module, and find which of them must stay together.

    torch.fx      each call in the module's own code, where a layer of torch is one call; a
                  submodule whose code cannot be traced is kept whole, and reported with the line
                  that prevents it
    torch.export  where torch.fx cannot trace the module or a submodule; sizes are fixed
    children      where neither can: submodules that are called one after the other, each once, with
                  the same results for several inputs; the code between them is left out, and
                  reported
    whole         where nothing works: one piece, which no cut divides

The traced operations compute what the module computes, on an example and in the module's current
mode; the module is left unchanged. Code that draws random numbers without a tensor argument, from
Python, NumPy or torch, is kept whole: a trace would hold the numbers of one draw as constants.
Above 300 lines, since the ways to trace, and what each refuses, are read together.
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
from typing import Any, NamedTuple, TextIO

import torch
from torch import Tensor, fx, nn

from ..errors import ConfigError
from ..system.reasons import reason
from .pieces import Pieces

_DRAWS = "it draws random numbers itself, which a trace would keep as constants"
_one_at_a_time = threading.Lock()
"""torch.fx patches ``nn.Module`` for the whole process while it traces a module."""


@dataclass(frozen=True, slots=True)
class KeptWhole:
    """A submodule that was not traced, and why, with file and line."""

    name: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedModel:
    """A module as a graph of operations.

    Args:
        module: the module that was traced.
        graph_module: its operations; parameters keep their names.
        pieces: operations that stay together, in an order in which they can be computed.
        how: ``torch.fx``, ``torch.export``, ``children`` or ``whole``.
        kept: submodules that were not traced.
        batch_statistics: layers whose result in training depends on the other samples of the batch.
        again: traces the module again with torch.fx, in its current state; None: it was not traced
            with torch.fx.
    """

    module: nn.Module
    graph_module: fx.GraphModule
    pieces: tuple[tuple[fx.Node, ...], ...]
    how: str
    kept: tuple[KeptWhole, ...]
    batch_statistics: tuple[str, ...]
    again: Callable[[], fx.GraphModule] | None = None

    def piece_of(self) -> dict[fx.Node, int]:
        """Return the number of each operation's piece."""
        return {node: number for number, piece in enumerate(self.pieces) for node in piece}

    def parameter_names(self) -> dict[int, str]:
        """Return the name of each parameter and buffer by its ``id``; a tied one's first name."""
        named = [*self.module.named_parameters(), *self.module.named_buffers()]
        return {id(tensor): name for name, tensor in reversed(named)}


def trace(module: nn.Module, inputs: Sequence[Tensor]) -> TracedModel:
    """Trace the operations of a module, with example inputs.

    Raises:
        ConfigError: the module does not run on the inputs.
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
        pieces=pieces.in_order(),
        how=how,
        kept=tuple(kept),
        batch_statistics=tuple(
            name
            for name, layer in module.named_modules()
            if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.training
        ),
        again=again,
    )


@contextlib.contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """Restore the module's buffers and gradients, and the random generator, on exit."""
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    grads = [(parameter, parameter.grad) for parameter in module.parameters()]
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                if name in buffers:
                    buffer.copy_(buffers[name])
        for parameter, grad in grads:
            parameter.grad = grad


# -- the operations --------------------------------------------------------------------------------


class _FxTrace(NamedTuple):
    """A module as traced by torch.fx."""

    graph_module: fx.GraphModule
    kept: list[KeptWhole]
    again: Callable[[], fx.GraphModule]


_Operations = tuple[fx.GraphModule, str, list[KeptWhole], Callable[[], fx.GraphModule] | None]
"""The fields ``graph_module``, ``how``, ``kept`` and ``again`` of a `TracedModel`."""


def _operations(module: nn.Module, inputs: Sequence[Tensor]) -> _Operations:
    """Trace a module in the first way that works and computes what the module computes."""
    fx_trace = _by_fx(module, len(inputs))
    if not isinstance(fx_trace, KeptWhole):
        if not _computes_the_same(module, fx_trace.graph_module, inputs):
            fx_trace = KeptWhole("", "its torch.fx trace computes something else")
        elif not fx_trace.kept:
            return fx_trace.graph_module, "torch.fx", [], fx_trace.again
    with contextlib.suppress(Exception), _quiet():
        before = generator_states()[1:]
        exported = torch.export.export(module, tuple(inputs), strict=False)
        has_drawn = generator_states()[1:] != before
        graph_module = exported.module(check_guards=False)
        is_graph = isinstance(graph_module, fx.GraphModule) and not has_drawn
        if is_graph and _computes_the_same(module, graph_module, inputs):
            return graph_module, "torch.export", [], None
    if not isinstance(fx_trace, KeptWhole):
        return fx_trace.graph_module, "torch.fx", fx_trace.kept, fx_trace.again
    kept = [KeptWhole(type(module).__name__, fx_trace.why)]
    chain = _by_children(module, inputs)
    if chain is not None and all(
        _computes_the_same(module, chain, variant) for variant in _variants(inputs)
    ):
        return chain, "children", kept, None
    return _as_one(module, len(inputs)), "whole", kept, None


def generator_states() -> tuple[bytes | object, ...]:
    """Return the states of the global generators of torch (first), Python and NumPy."""
    states: list[bytes | object] = [torch.get_rng_state().numpy().tobytes(), random.getstate()]
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, *rest = numpy.random.get_state()
        states += [kind, keys.tobytes(), *rest]
    return tuple(states)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch.export, which prints and logs pages about what it cannot export.

    What other threads print is printed: a run's controller says why another worker has failed.
    """
    level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with contextlib.redirect_stderr(_WithoutThisThread(sys.stderr)):
            yield
    finally:
        logging.disable(level)


class _WithoutThisThread(io.TextIOBase):
    """A stream that drops what the thread that has made it writes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._thread = stream, threading.get_ident()

    def write(self, text: str) -> int:
        is_dropped = threading.get_ident() == self._thread
        return len(text) if is_dropped else self._stream.write(text)

    def flush(self) -> None:
        self._stream.flush()


class _BufferProxy(fx.Proxy):
    """A buffer that is read during a trace: its shape and dtype are known, its values are not."""

    def __init__(self, node: fx.Node, tracer: fx.Tracer, buffer: Tensor) -> None:
        super().__init__(node, tracer)
        self.shape, self.ndim, self.dtype = buffer.shape, buffer.ndim, buffer.dtype
        self.device, self.size, self.dim = buffer.device, buffer.size, buffer.dim
        self.numel = buffer.numel

    def __len__(self) -> int:
        return self.shape[0]


class _Tracer(fx.Tracer):
    """Trace a module except for some submodules, and note in which submodule a trace fails.

    Other threads may run modules meanwhile, as those that load data do.

    Args:
        leaves: names of submodules that are not traced.
        reads_buffers: whether operations read buffers when they run; otherwise the values that
            buffers have now become constants.
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
        value = super().getattr(attr, attr_val, parameter_proxy_cache)
        if value is attr_val or isinstance(attr_val, nn.Parameter):
            return value
        return _BufferProxy(value.node, self, attr_val)

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        name, before = self.path_of_module(m), generator_states()
        try:
            output = super().call_module(m, forward, args, kwargs)
        except Exception:  # raised again: only the place is noted
            if self.failed_in is None:
                self.failed_in = name
            raise
        if self.drew_in is None and generator_states() != before:
            self.drew_in = name
        return output


def _by_fx(module: nn.Module, num_inputs: int) -> _FxTrace | KeptWhole:
    """Trace a module, but for submodules that cannot be traced; or say why the module cannot.

    Where code branches on the values of buffers, they are traced as constants.
    """
    constants = _constants(module, num_inputs)
    fx_trace = _trace_by_fx(module, num_inputs, constants, reads_buffers=True)
    if isinstance(fx_trace, KeptWhole) or fx_trace.kept:
        other = _trace_by_fx(module, num_inputs, constants, reads_buffers=False)
        if isinstance(fx_trace, KeptWhole):
            return other
        if not isinstance(other, KeptWhole) and len(other.kept) < len(fx_trace.kept):
            return other
    return fx_trace


def _trace_by_fx(
    module: nn.Module, num_inputs: int, constants: dict[str, Any], *, reads_buffers: bool
) -> _FxTrace | KeptWhole:
    """Trace a module, leaving out each submodule that fails, until the trace succeeds."""
    kept: list[KeptWhole] = []

    def again() -> fx.GraphModule:
        return run(_Tracer((leaf.name for leaf in kept), reads_buffers=reads_buffers))

    def run(tracer: _Tracer) -> fx.GraphModule:
        with _one_at_a_time, attributes_kept(module):
            graph = tracer.trace(module, constants)
            _drop_constants(graph, num_inputs)
            return fx.GraphModule(tracer.root, graph)

    while True:
        tracer = _Tracer((leaf.name for leaf in kept), reads_buffers=reads_buffers)
        before = generator_states()
        try:
            graph_module = run(tracer)
            if generator_states() == before:
                return _FxTrace(graph_module, kept, again)
            name, why = tracer.drew_in or "", _DRAWS
        except Exception as error:  # torch.fx raises whatever the user's code raises
            name, why = tracer.failed_in or "", reason(error)
        if not name or any(leaf.name == name for leaf in kept):
            return KeptWhole("", why)
        kept.append(KeptWhole(name, why))


@contextlib.contextmanager
def attributes_kept(module: nn.Module) -> Iterator[None]:
    """Restore on exit the attributes of all modules, whatever traced code sets on them."""
    before = [(vars(layer), dict(vars(layer))) for layer in module.modules()]
    try:
        yield
    finally:
        for attributes, saved in before:
            for name in [name for name in attributes if name not in saved]:
                del attributes[name]
            attributes.update(saved)


def _constants(module: nn.Module, num_inputs: int) -> dict[str, Any]:
    """Return the defaults of the arguments of forward() after the inputs."""
    parameters = [
        parameter
        for parameter in inspect.signature(module.forward).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    rest = parameters[num_inputs:]
    return {p.name: p.default for p in rest if p.default is not p.empty}


def _drop_constants(graph: fx.Graph, num_inputs: int) -> None:
    """Remove the inputs that are constants, and what torch.fx asserts about them."""

    def drop(node: fx.Node) -> None:
        for user in list(node.users):
            drop(user)
        graph.erase_node(node)

    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for node in placeholders[num_inputs:]:
        drop(node)


def _variants(inputs: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """Yield inputs on which code that branches on their values may take another branch."""
    for factor in (1, -1, 0, 0.37, 1.9, -7.3, 100, -1e4):
        yield tuple(x * factor if x.is_floating_point() else x.flip(0) for x in inputs)


def _by_children(module: nn.Module, inputs: Sequence[Tensor]) -> fx.GraphModule | None:
    """Chain the children, if each is called once, with the output of the one before; else None."""
    calls: list[tuple[str, Any, Any]] = []
    states = [generator_states()]

    def record(_: nn.Module, args: Any, output: Any, name: str) -> None:
        calls.append((name, args, output))
        states.append(generator_states())

    handles = []
    for name, child in module.named_children():
        handles.append(child.register_forward_hook(partial(record, name=name)))
        handles.append(
            child.register_forward_pre_hook(lambda *_: states.append(generator_states()))
        )
    try:
        with torch.no_grad():
            outputs = module(*inputs)
    finally:
        for handle in handles:
            handle.remove()
    states.append(generator_states())
    if states[::2] != states[1::2]:  # the module's own code draws between its children
        return None
    value: Any = inputs[0] if len(inputs) == 1 else None
    for _, args, output in calls:
        if len(args) != 1 or args[0] is not value:
            return None
        value = output
    names = [name for name, _, _ in calls]
    if not calls or value is not outputs or len(set(names)) < len(names):
        return None
    graph = fx.Graph()
    node = graph.placeholder("inputs")
    for name in names:
        node = graph.call_module(name, (node,))
    graph.output(node)
    return fx.GraphModule(module, graph)


class WholeModel(nn.Module):
    """A module whose only operation is to call the model."""

    def __init__(self, whole: nn.Module) -> None:
        super().__init__()
        self.whole = whole


def _as_one(module: nn.Module, num_inputs: int) -> fx.GraphModule:
    graph = fx.Graph()
    placeholders = tuple(graph.placeholder(f"input_{number}") for number in range(num_inputs))
    graph.output(graph.call_module("whole", placeholders))
    return fx.GraphModule(WholeModel(module), graph)


def _computes_the_same(module: nn.Module, other: nn.Module, inputs: Sequence[Tensor]) -> bool:
    """Whether both return the same tensors for some inputs, from the same random state."""
    results = []
    for function in (module, other):
        with untouched(module), torch.no_grad():
            torch.manual_seed(0)
            try:
                outputs = function(*(tensor.clone() for tensor in inputs))
            except Exception:  # a traced graph that raises is not the same
                return False
            results.append(torch.utils._pytree.tree_leaves(outputs))
    expected, actual = ([x for x in leaves if isinstance(x, Tensor)] for leaves in results)
    if len(expected) != len(actual) or not expected:
        return False
    if any(tensor.is_meta for tensor in expected):
        return all(a.shape == b.shape for a, b in zip(expected, actual, strict=True))
    return all(
        a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)
        for a, b in zip(expected, actual, strict=True)
    )
