"""The layers of a model: leaving a step between two of them, and what the plan says of them.

Forward is left in hooks that look at one word; backward in the post-accumulate hooks
(replica/replica.py). In a compiled model module hooks would break the graph, so there a step is
left between forward, backward and step only. This module must not know who cancels, or why.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.module import register_module_forward_pre_hook

from ..plan import LayerParameters


def is_compiled(model: nn.Module) -> bool:
    """Whether calling the model runs a compiled graph."""
    return hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None


def grain(model: nn.Module) -> str:
    """Where work in flight can be left, in words for the plan."""
    return "between passes (compiled)" if is_compiled(model) else "between layers"


def watch_forward(model: nn.Module, check: Callable[[], None]) -> None:
    """Call ``check`` before each layer's forward; it may raise to leave the step.

    Nothing stays on a layer that a copy of the model, or its pickle, would take along.
    """
    compiled: Any = getattr(model, "_compiled_call_impl", None)
    if compiled is not None:  # around it: a hook inside would break the graph

        def watched(*arguments: Any, **options: Any) -> Any:
            check()
            return compiled(*arguments, **options)

        model._compiled_call_impl = watched
        return
    if hasattr(model, "_orig_mod"):
        _watch_wrapper(model, check)
        return
    if any(is_compiled(one) for one in model.modules()):
        return  # left in backward: a hook for all modules would break the graph of that part
    for module in model.modules():
        if not any(True for _ in module.children()):
            _checks[module] = check
    if not _installed:
        _installed.append(register_module_forward_pre_hook(_check_layer))


def unwatch_forward(model: nn.Module) -> None:
    """Nothing is called before its layers any more; what lies on a compiled one is the caller's."""
    for module in model.modules():
        _checks.pop(module, None)


def _watch_wrapper(model: nn.Module, check: Callable[[], None]) -> None:
    """Torch's wrapper of a compiled model leaves its ``forward`` behind when it is copied."""
    forward: Any = model.forward

    def watched(*arguments: Any, **options: Any) -> Any:
        check()
        return forward(*arguments, **options)

    model.forward = watched


_checks: "weakref.WeakKeyDictionary[nn.Module, Callable[[], None]]" = weakref.WeakKeyDictionary()
_installed: list[Any] = []
"""The hook on all modules, once a model is watched."""


def _check_layer(module: nn.Module, _: Any) -> None:
    if (check := _checks.get(module)) is not None:
        check()
    elif not _checks and _installed:  # the models are gone
        _installed.pop().remove()


class Modes:
    """Whether each layer trains, and gradients are made, where a step or an evaluation began.

    One that is left in the middle, as in ``model.eval() ... model.train()``, puts it back.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.modules())
        self.note()

    def note(self) -> None:
        """It begins."""
        self._found = [one.training for one in self._modules]
        self._makes_gradients = torch.is_grad_enabled()

    def put_back(self) -> None:
        """It was left."""
        set_modes(self._modules, self._found)
        torch.set_grad_enabled(self._makes_gradients)


def set_modes(modules: Sequence[nn.Module], modes: Sequence[bool]) -> None:
    """Each module in its mode, told by its own ``train()``, which may do more than set a flag.

    An adapter merges its weights for evaluation there, and takes them out again.

    Args:
        modules: each before those that it holds, as ``model.modules()`` has them.
    """
    for one, trains in zip(modules, modes, strict=True):
        if one.training != trains:  # a module takes 2 us to be told
            one.train(trains)
    for one, trains in zip(modules, modes, strict=True):
        if one.training != trains:  # two hold it, or a train() above it has a will of its own
            one.training = trains


def has_own_modes(module: nn.Module) -> bool:
    """Whether going into evaluation, or back, does more here than to set a flag."""
    kind = type(module)
    return kind.train is not nn.Module.train or kind.eval is not nn.Module.eval


def parameter_table(model: nn.Module) -> list[LayerParameters]:
    """What each layer holds; of layers without parameters only those that are not torch's own."""
    seen: set[int] = set()
    rows = []
    for name, module in model.named_modules():
        held = list(module.parameters(recurse=False))
        is_leaf = not any(True for _ in module.children())
        if not held and (not is_leaf or type(module).__module__.startswith("torch.")):
            continue
        own = [one for one in held if id(one) not in seen]
        shapes = [_shape(one.shape) if id(one) not in seen else "shared" for one in held]
        seen.update(map(id, held))
        rows.append(
            LayerParameters(
                name, type(module).__name__, ", ".join(shapes),
                sum(one.numel() for one in own),
                sum(one.numel() for one in own if one.requires_grad),
                sum(one.numel() * one.element_size() for one in own),
            )
        )  # fmt: skip
    return rows


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "1"


class WrittenBuffers:
    """Buffers of a model's own layers, and whether a forward pass has written into one.

    Torch's layers, and norms derived from them, keep statistics there, of which a mean is right; so
    is one of a single number. Of a queue, a memory of samples or labels it is not.
    """

    def __init__(self, model: nn.Module) -> None:
        self._held = [
            (f"{name}.{key}" if name else key, module, key)
            for name, module in model.named_modules()
            if not (type(module).__module__.startswith("torch.") or isinstance(module, _NormBase))
            for key, buffer in module._buffers.items()
            if buffer is not None and buffer.numel() > 1
            and key not in module._non_persistent_buffers_set
        ]  # fmt: skip
        self._before: list[tuple[int, ...]] = []

    def __bool__(self) -> bool:
        return bool(self._held)

    def note(self) -> None:
        """A pass begins; the first backward in it says ``written``."""
        self._before = self._now()

    def written(self) -> str | None:
        """The name of one that was written, or made anew, since ``note``; None: none was."""
        before, self._before = self._before, []
        if not before:
            return None
        pairs = zip(self._held, before, self._now(), strict=True)
        return next((name for (name, *_), then, now in pairs if then != now), None)

    def _now(self) -> list[tuple[int, ...]]:
        held = [module._buffers[key] for _, module, key in self._held]
        return [() if one is None else (id(one), one._version, one.data_ptr()) for one in held]


def own_buffer_note(name: str) -> str:
    """What becomes of a buffer that the layers of a model write into."""
    return (
        f"buffer {name!r} is written in the forward pass, and an update averages it over workers "
        "(whole numbers: the maximum), which is right for statistics alone; what holds single "
        "samples, as a queue, a memory or labels, is kept as a plain attribute (self.name = "
        "tensor), each worker's own"
    )


def batch_norm_note(model: nn.Module, batch_size: int, parts: int) -> tuple[str, ...]:
    """For the plan: how many samples batch norm sees, where that is not the whole batch."""
    has_batch_norm = any(isinstance(one, _BatchNorm) and one.training for one in model.modules())
    if parts < 2 or not has_batch_norm:
        return ()
    return (
        f"batch norm normalises each mini-batch of {-(-batch_size // parts)} samples by itself, "
        f"not the {batch_size} of an update; its running statistics are averaged",
    )


def gradient_hooks_note(model: nn.Module) -> tuple[str, ...]:
    """For the plan: parameters with hooks on their gradients, which run before the average."""
    hooked = [
        name
        for name, one in model.named_parameters()
        if one._backward_hooks or one._post_accumulate_grad_hooks
    ]
    if not hooked:
        return ()
    more = f" and {len(hooked) - 1} more" if len(hooked) > 1 else ""
    return (
        f"hooks on the gradient of {hooked[0]!r}{more} act on each worker's part, before it is "
        "averaged: a factor or a mask comes out the same, a clip does not "
        "(pace.clip_grad_norm_, pace.clip_grad_value_)",
    )
