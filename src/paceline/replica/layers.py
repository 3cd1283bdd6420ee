"""The layers of a model: leaving a step between two layers, and the plan's notes on layers.

The forward pass is left in hooks that read one word, the backward pass in post-accumulate hooks
(replica/replica.py). In a compiled model module hooks would break the graph, so there a step is
left only between forward, backward and step. This module must not know who cancels, or why.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.module import register_module_forward_pre_hook

from ..plan import LayerParameters


def is_compiled(model: nn.Module) -> bool:
    """Whether calling the model runs a compiled graph."""
    return hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None


def grain(model: nn.Module) -> str:
    """Where a step can be left, in words for the plan."""
    return "between passes (compiled)" if is_compiled(model) else "between layers"


def watch_forward(model: nn.Module, check: Callable[[], None]) -> None:
    """Call ``check`` before each layer's forward; it may raise to leave the step.

    Nothing is stored on a layer that a copy or pickle of the model would include.
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
    if any(is_compiled(module) for module in model.modules()):
        return  # steps are left in backward only: a hook on all modules would break the graph
    for module in model.modules():
        if not any(True for _ in module.children()):
            _checks[module] = check
    if not _installed:
        _installed.append(register_module_forward_pre_hook(_check_layer))


def unwatch_forward(model: nn.Module) -> None:
    """Undo ``watch_forward``, except on a compiled model, which is up to the caller."""
    for module in model.modules():
        _checks.pop(module, None)


def _watch_wrapper(model: nn.Module, check: Callable[[], None]) -> None:
    """Wrap ``forward`` of torch's wrapper of a compiled model, which copies do not include."""
    forward: Any = model.forward

    def watched(*arguments: Any, **options: Any) -> Any:
        check()
        return forward(*arguments, **options)

    model.forward = watched


_checks: "weakref.WeakKeyDictionary[nn.Module, Callable[[], None]]" = weakref.WeakKeyDictionary()
_installed: list[Any] = []
"""The hook on all modules, if a model is watched."""


def _check_layer(module: nn.Module, _: Any) -> None:
    if (check := _checks.get(module)) is not None:
        check()
    elif not _checks and _installed:  # the models are gone
        _installed.pop().remove()


class Modes:
    """The training modes of all layers, and the grad mode, at the start of a step or evaluation.

    They are restored if it is left in the middle, as in ``model.eval() ... model.train()``.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.modules())
        self.note()

    def note(self) -> None:
        """Save the current modes."""
        self._modes = [module.training for module in self._modules]
        self._makes_gradients = torch.is_grad_enabled()

    def put_back(self) -> None:
        """Restore the saved modes."""
        set_modes(self._modules, self._modes)
        torch.set_grad_enabled(self._makes_gradients)


def set_modes(modules: Sequence[nn.Module], modes: Sequence[bool]) -> None:
    """Set each module's mode by its own ``train()``, which may do more than set a flag.

    An adapter, for example, merges its weights for evaluation there, and separates them again.

    Args:
        modules: parents before children, as in ``model.modules()``.
    """
    for module, trains in zip(modules, modes, strict=True):
        if module.training != trains:  # a call takes 2 us
            module.train(trains)
    for module, trains in zip(modules, modes, strict=True):
        if module.training != trains:  # it has two parents, or a parent's train() differs
            module.training = trains


def has_own_modes(module: nn.Module) -> bool:
    """Whether this module's ``train()`` or ``eval()`` does more than set a flag."""
    kind = type(module)
    return kind.train is not nn.Module.train or kind.eval is not nn.Module.eval


def parameter_table(model: nn.Module) -> list[LayerParameters]:
    """The parameters of each layer; layers without any are listed if they are not torch's own."""
    counted: set[int] = set()
    rows = []
    for name, module in model.named_modules():
        parameters = list(module.parameters(recurse=False))
        is_leaf = not any(True for _ in module.children())
        if not parameters and (not is_leaf or type(module).__module__.startswith("torch.")):
            continue
        new_parameters = [parameter for parameter in parameters if id(parameter) not in counted]
        shapes = [
            "shared" if id(parameter) in counted else _shape(parameter.shape)
            for parameter in parameters
        ]
        counted.update(map(id, parameters))
        rows.append(
            LayerParameters(
                name, type(module).__name__, ", ".join(shapes),
                sum(parameter.numel() for parameter in new_parameters),
                sum(parameter.numel() for parameter in new_parameters if parameter.requires_grad),
                sum(parameter.numel() * parameter.element_size() for parameter in new_parameters),
            )
        )  # fmt: skip
    return rows


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "1"


class WrittenBuffers:
    """Detects whether a forward pass writes into buffers of the model's own layers.

    Torch's layers, and norms derived from them, keep statistics there, which can be averaged; so
    can a single number. A queue, or a memory of samples or labels, cannot. A buffer that was not
    registered when this was made is averaged with nothing.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._registered = {name for name, _ in _states(model)}
        self._is_begun = False
        self._held = [
            (f"{name}.{key}" if name else key, module, key)
            for name, module in model.named_modules()
            if not (type(module).__module__.startswith("torch.") or isinstance(module, _NormBase))
            for key, buffer in module._buffers.items()
            if buffer is not None and buffer.numel() > 1
            and key not in module._non_persistent_buffers_set
        ]  # fmt: skip
        self._noted: list[tuple[int, ...]] = []

    def note(self) -> None:
        """Note the buffers at the start of a pass; the first backward calls ``written``."""
        self._noted, self._is_begun = self._now(), True

    def late(self) -> str | None:
        """Return the name of a buffer that was registered later, or None; once after ``note``."""
        is_begun, self._is_begun = self._is_begun, False
        names = (name for name, _ in _states(self._model)) if is_begun else ()
        return next((name for name in names if name not in self._registered), None)

    def written(self) -> str | None:
        """Return the name of a buffer that was written or replaced since ``note``, or None."""
        noted, self._noted = self._noted, []
        if not noted:
            return None
        pairs = zip(self._held, noted, self._now(), strict=True)
        return next((name for (name, *_), before, after in pairs if before != after), None)

    def _now(self) -> list[tuple[int, ...]]:
        buffers = [module._buffers[key] for _, module, key in self._held]
        return [
            () if buffer is None else (id(buffer), buffer._version, buffer.data_ptr())
            for buffer in buffers
        ]


def _states(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers of the model's state, by name."""
    for name, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                yield f"{name}.{key}" if name else key, buffer


def late_buffer_note(name: str) -> str:
    """For the plan: a buffer that a forward pass has registered."""
    return (
        f"buffer {name!r} was registered after prepare(), so no update averages it, and each "
        "worker has its own: a statistic should be registered with its shape before; a cache is "
        "no part of the state: register_buffer(..., persistent=False)"
    )


def own_buffer_note(name: str) -> str:
    """For the plan: how a buffer that layers write into is averaged."""
    return (
        f"buffer {name!r} is written in the forward pass, and an update averages it over workers "
        "(whole numbers: the maximum), which is right only for statistics; keep single samples, "
        "such as a queue, a memory or labels, in a plain attribute (self.name = tensor), separate "
        "in each worker"
    )


def batch_norm_note(model: nn.Module, batch_size: int, parts: int) -> tuple[str, ...]:
    """For the plan: how many samples batch norm sees, if not the whole batch."""
    has_batch_norm = any(
        isinstance(module, _BatchNorm) and module.training for module in model.modules()
    )
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
        for name, parameter in model.named_parameters()
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks
    ]
    if not hooked:
        return ()
    more = f" and {len(hooked) - 1} more" if len(hooked) > 1 else ""
    return (
        f"hooks on the gradient of {hooked[0]!r}{more} act on each worker's part, before it is "
        "averaged: a factor or a mask gives the same result, a clip does not "
        "(pace.clip_grad_norm_, pace.clip_grad_value_)",
    )
