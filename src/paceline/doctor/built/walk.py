"""One pass through a model with inputs of given sizes: what each layer is given, makes and costs.

    before a layer   its input is looked at: where it has another number of features than the layer
                     takes, that is kept, and the layer is made to fit
    after it         sizes and FLOPs; its output is marked with what made it
    views, dropout   hand the mark of their input on; any other operation takes it away
    all of these     are counted, by the tensor that they are given

Two layers are neighbours where the second, and nobody else, is given what the first has marked: what
a residual connection carries on, too, is two things. On the meta device sizes are computed and
numbers are not; a model that asks for numbers is walked on the CPU instead. This module must not
judge.
"""

import copy
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...exports.subject import InputShape
from ...system.reasons import reason

_KEEPS = {"view", "reshape", "flatten", "squeeze", "unsqueeze", "permute", "transpose", "contiguous",
          "dropout", "dropout1d", "dropout2d", "dropout3d", "float", "to"}  # fmt: skip
_PASSES = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.Identity,
           nn.Flatten, nn.Unflatten)  # fmt: skip
_MARKS = {"softmax", "log_softmax", "sigmoid", "relu", "gelu", "tanh", "silu"}
_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSeen:
    """One call of one layer, in the order of the pass.

    Attributes:
        name: its path in the model; kind: its class.
        given, made: sizes of its first input and of its output.
        wanted: the number of features or channels that it takes, where it is given another one.
        after: the name of the layer whose output it alone is given, nothing but views between;
            empty: no such.
        sizes: M, N and K of its matrix product; None: it has none.
        flops: of the forward pass; has_bias: whether it adds one.
        groups: of a convolution.
    """

    name: str
    kind: str
    given: tuple[int, ...]
    made: tuple[int, ...] = ()
    wanted: int | None = None
    after: str = ""
    sizes: tuple[int, int, int] | None = None
    has_bias: bool = False
    groups: int = 1

    @property
    def flops(self) -> int:
        return 0 if self.sizes is None else 2 * math.prod(self.sizes) * self.groups


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWalk:
    """What was seen.

    Attributes:
        layers: each call; ends_in: what made the output last: a layer's kind or a function's name.
        failed: how and where it ended before its end; empty: it did not.
        unused: parameters without a gradient; hidden: attributes whose layers are in a plain list
            or dict.
        outputs: sizes of the first output.
    """

    layers: tuple[LayerSeen, ...]
    outputs: tuple[int, ...] = ()
    ends_in: str = ""
    failed: str = ""
    unused: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    num_parameters: int = 0


def walk(model: nn.Module, batch: int, shapes: Sequence[InputShape]) -> ModelWalk:
    """Walk a copy of a model.

    Args:
        batch: samples of each input.
    """
    try:
        made = copy.deepcopy(model).to("meta")
        found = _Walk(made, "meta").run(_inputs(batch, shapes, "meta"))
    except NotImplementedError:  # an operation without a form for sizes alone
        found = None
    if found is None or _asks_for_numbers(found.failed):
        found = _Walk(copy.deepcopy(model), "cpu").run(_inputs(batch, shapes, "cpu"))
    return found


def _asks_for_numbers(failed: str) -> bool:
    return "meta" in failed.lower() or "data-dependent" in failed.lower()


def _inputs(batch: int, shapes: Sequence[InputShape], device: str) -> list[Tensor]:
    return [
        torch.rand(batch, *one.shape, device=device).to(one.dtype)
        if one.dtype.is_floating_point
        else torch.zeros(batch, *one.shape, device=device, dtype=one.dtype)
        for one in shapes
    ]


class _Marks(TorchFunctionMode):
    """Which tensor was made by what, and to how many it was given."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[str, Tensor]] = {}
        self._uses: Counter[int] = Counter()

    def put(self, value: object, name: str) -> None:
        if isinstance(value, Tensor):
            self._of[id(value)] = (name, value)  # kept: its id stays its own

    def get(self, value: object) -> str:
        return self._of[id(value)][0] if id(value) in self._of else ""

    def given(self, values: object) -> None:
        """Somebody is given these."""
        leaves = torch.utils._pytree.tree_leaves(values)
        self._uses.update({id(one) for one in leaves} & self._of.keys())

    def shared(self) -> set[str]:
        """Who has made what more than one was given."""
        return {name for key, (name, _) in self._of.items() if self._uses[key] > 1}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        is_itself = bool(args) and found is args[0] and name in _KEEPS
        if not is_itself and (found is None or first_tensor(found) is not None):
            self.given((args, kwargs))
        if name in _KEEPS and args:
            self.put(found, self.get(args[0]))
        elif name.rstrip("_") in _MARKS:
            self.put(found, name.rstrip("_"))
        return found


class _Walk:
    def __init__(self, model: nn.Module, device: str) -> None:
        self._model, self._device = model.train(), device
        self._marks = _Marks()
        self._layers: list[LayerSeen] = []
        self._inside = ""

    def run(self, inputs: Sequence[Tensor]) -> ModelWalk:
        for name, one in self._model.named_modules():
            if not list(one.children()):
                one.register_forward_pre_hook(self._before(name or "the model"))
                one.register_forward_hook(self._after(name or "the model"))
        failed = ""
        outputs: Tensor | None = None
        unused: tuple[str, ...] = ()
        try:
            with self._marks:
                every = self._model(*inputs)
            self._marks.given(every)
            outputs = first_tensor(every)
            unused = self._unused(outputs)
        except NotImplementedError:
            raise
        except Exception as error:  # the user's model may raise anything
            failed = f"{reason(error)} (in or after {self._inside or 'its forward()'})"
        shared = self._marks.shared()
        layers = (replace(one, after="") if one.after in shared else one for one in self._layers)
        return ModelWalk(
            layers=tuple(layers), failed=failed, unused=unused,
            outputs=() if outputs is None else tuple(outputs.shape),
            ends_in=self._kind_of(self._marks.get(outputs)), hidden=tuple(hidden(self._model)),
            num_parameters=sum(one.numel() for one in self._model.parameters()),
        )  # fmt: skip

    def _kind_of(self, mark: str) -> str:
        return next((one.kind for one in self._layers if one.name == mark), mark)

    def _unused(self, outputs: Tensor | None) -> tuple[str, ...]:
        if outputs is None or not outputs.requires_grad:
            return ()
        outputs.sum().backward()
        own = self._model.named_parameters()
        return tuple(name for name, one in own if one.requires_grad and one.grad is None)

    def _before(self, name: str) -> Callable[[nn.Module, Any], None]:
        def look(module: nn.Module, args: Any) -> None:
            self._inside = f"{name} ({type(module).__name__})"
            given = first_tensor(args)
            if given is None:
                return
            wanted = make_fit(module, given)
            self._layers.append(
                LayerSeen(
                    name=name, kind=type(module).__name__, given=tuple(given.shape), wanted=wanted,
                    after=self._marks.get(given),
                    has_bias=getattr(module, "bias", None) is not None,
                    groups=int(getattr(module, "groups", 1)),
                )
            )  # fmt: skip

        return look

    def _after(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def look(module: nn.Module, args: Any, found: Any) -> None:
            made, given = first_tensor(found), first_tensor(args)
            if made is None or given is None or not self._layers or self._layers[-1].name != name:
                return
            seen = self._layers[-1]
            self._layers[-1] = LayerSeen(
                name=name, kind=seen.kind, given=seen.given, made=tuple(made.shape),
                wanted=seen.wanted, after=seen.after, has_bias=seen.has_bias, groups=seen.groups,
                sizes=product_sizes(module, tuple(made.shape)),
            )  # fmt: skip
            passes = isinstance(module, _PASSES)
            self._marks.put(made, self._marks.get(given) if passes else name)

        return look


def first_tensor(value: object) -> Tensor | None:
    """The first tensor of what a module is given, or makes."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return next((one for one in map(first_tensor, value) if one is not None), None)
    logits = getattr(value, "logits", None)
    return logits if isinstance(logits, Tensor) else None


def make_fit(module: nn.Module, given: Tensor) -> int | None:
    """Make a layer take what it is given; what it took before, None where it did fit."""
    if isinstance(module, nn.Linear) and given.shape[-1] != module.in_features:
        wanted, module.in_features = module.in_features, given.shape[-1]
        module.weight = _empty(module.weight, (module.out_features, given.shape[-1]))
        return wanted
    if isinstance(module, _CONVS) and module.groups == 1 and given.dim() == module.weight.dim():
        if given.shape[1] == module.in_channels:
            return None
        wanted, module.in_channels = module.in_channels, given.shape[1]
        rest = tuple(module.weight.shape[2:])
        module.weight = _empty(module.weight, (module.out_channels, given.shape[1], *rest))
        return wanted
    if isinstance(module, _NORMS) and given.dim() > 1 and given.shape[1] != module.num_features:
        wanted, module.num_features = module.num_features, given.shape[1]
        for name in ("weight", "bias"):
            if getattr(module, name) is not None:
                setattr(module, name, _empty(getattr(module, name), (given.shape[1],)))
        for name in ("running_mean", "running_var"):
            if getattr(module, name) is not None:
                setattr(module, name, torch.ones(given.shape[1], device=given.device))
        return wanted
    return None


def _empty(like: Tensor, shape: tuple[int, ...]) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, dtype=like.dtype, device=like.device))


def product_sizes(module: nn.Module, made: tuple[int, ...]) -> tuple[int, int, int] | None:
    """M, N and K of the matrix product that a layer is, for each of its groups."""
    if isinstance(module, nn.Linear):
        return math.prod(made[:-1]), module.out_features, module.in_features
    if isinstance(module, _CONVS):
        places = made[0] * math.prod(made[2:])
        groups = module.groups
        depth = module.in_channels // groups * math.prod(module.kernel_size)
        return places, module.out_channels // groups, depth
    return None


def hidden(model: nn.Module) -> list[str]:
    """Attributes that hold layers in a plain list, tuple or dict: nobody trains those."""
    found = []
    for name, one in model.named_modules():
        for key, value in vars(one).items():
            listed = list(value.values()) if isinstance(value, dict) else value
            is_plain = isinstance(listed, list | tuple) and not key.startswith("_")
            if is_plain and any(isinstance(each, nn.Module) for each in listed):
                found.append(f"{name}.{key}" if name else key)
    return found
