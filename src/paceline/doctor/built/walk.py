"""Walk a model once with inputs of given sizes: the input, output and cost of each layer.

    before a layer   if its input has another number of features than the layer takes, that is
                     recorded, and the layer is made to fit
    after it         sizes and FLOPs; its output is marked with the layer's name
    views, dropout   pass the mark of their input on; any other operation drops it
    all of these     are counted, by the tensor that they get

Two layers are neighbours where the second, and nothing else, gets the output that the first has
marked; an output that a residual connection uses, too, has no single successor. The meta device
computes sizes without numbers; a model that needs numbers is walked on the CPU instead.

Above 300 lines, since the pass and its marks depend on each other. This module must not judge.
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

_KEEPS_MARK = {"view", "reshape", "flatten", "squeeze", "unsqueeze", "permute", "transpose", "contiguous",
          "dropout", "dropout1d", "dropout2d", "dropout3d", "float", "to"}  # fmt: skip
_KEEPS_MARK_LAYERS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.Identity,
           nn.Flatten, nn.Unflatten)  # fmt: skip
_MARKING = {"softmax", "log_softmax", "sigmoid", "relu", "gelu", "tanh", "silu"}
_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSeen:
    """One call of one layer.

    Attributes:
        name: the layer's path in the model.
        kind: the name of its class.
        input_shape: sizes of its first input.
        output_shape: sizes of its output.
        expected: the features or channels that it takes, if its input has another number of them.
        after: the layer whose output it alone gets, with only views between them; empty: none.
        sizes: M, N and K of its matrix product; None: it has none.
        has_bias: whether it adds a bias.
        groups: the groups of a convolution.
    """

    name: str
    kind: str
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...] = ()
    expected: int | None = None
    after: str = ""
    sizes: tuple[int, int, int] | None = None
    has_bias: bool = False
    groups: int = 1

    @property
    def flops(self) -> int:
        """The FLOPs of its matrix product in the forward pass."""
        return 0 if self.sizes is None else 2 * math.prod(self.sizes) * self.groups


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWalk:
    """The result of a walk.

    Attributes:
        layers: each call of a layer, in the order of the forward pass.
        outputs: sizes of the first output.
        ends_in: what made the output: a layer's kind or a function's name.
        failed: how and where the forward pass failed; empty: it did not.
        unused: the parameters that get no gradient.
        hidden: the attributes that hold layers in a plain list or dict.
        num_parameters: how many numbers its parameters have.
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
        shapes: sizes and dtype of each input, without the batch.
    """
    try:
        on_meta = copy.deepcopy(model).to("meta")
        result = _Walk(on_meta, "meta").run(_inputs(batch, shapes, "meta"))
    except NotImplementedError:  # an operation that the meta device does not have
        result = None
    if result is None or _needs_numbers(result.failed):
        result = _Walk(copy.deepcopy(model), "cpu").run(_inputs(batch, shapes, "cpu"))
    return result


def _needs_numbers(failed: str) -> bool:
    """Whether a failure on the meta device comes from its tensors having no numbers."""
    return "meta" in failed.lower() or "data-dependent" in failed.lower()


def _inputs(batch: int, shapes: Sequence[InputShape], device: str) -> list[Tensor]:
    return [
        torch.rand(batch, *sample.shape, device=device).to(sample.dtype)
        if sample.dtype.is_floating_point
        else torch.zeros(batch, *sample.shape, device=device, dtype=sample.dtype)
        for sample in shapes
    ]


class _Marks(TorchFunctionMode):
    """The layer or function that made each tensor, and how often each tensor is used."""

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[str, Tensor]] = {}
        self._uses: Counter[int] = Counter()

    def put(self, value: object, name: str) -> None:
        """Mark a tensor with the name of what made it."""
        if isinstance(value, Tensor):
            self._by_id[id(value)] = (name, value)  # kept alive, so that its id stays unique

    def get(self, value: object) -> str:
        """Return the mark of a tensor, or ""."""
        return self._by_id[id(value)][0] if id(value) in self._by_id else ""

    def count(self, values: object) -> None:
        """Count one use of each marked tensor in these values."""
        leaves = torch.utils._pytree.tree_leaves(values)
        self._uses.update({id(leaf) for leaf in leaves} & self._by_id.keys())

    def shared(self) -> set[str]:
        """Return the marks of tensors that are used more than once."""
        return {name for key, (name, _) in self._by_id.items() if self._uses[key] > 1}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        is_itself = bool(args) and result is args[0] and name in _KEEPS_MARK
        if not is_itself and (result is None or first_tensor(result) is not None):
            self.count((args, kwargs))
        if name in _KEEPS_MARK and args:
            self.put(result, self.get(args[0]))
        elif name.rstrip("_") in _MARKING:
            self.put(result, name.rstrip("_"))
        return result


class _Walk:
    def __init__(self, model: nn.Module, device: str) -> None:
        self._model, self._device = model.train(), device
        self._marks = _Marks()
        self._layers: list[LayerSeen] = []
        self._inside = ""

    def run(self, inputs: Sequence[Tensor]) -> ModelWalk:
        """Make the forward and backward pass, and return what was seen."""
        for name, module in self._model.named_modules():
            if not list(module.children()):
                module.register_forward_pre_hook(self._before(name or "the model"))
                module.register_forward_hook(self._after(name or "the model"))
        failed = ""
        output: Tensor | None = None
        unused: tuple[str, ...] = ()
        try:
            with self._marks:
                outputs = self._model(*inputs)
            self._marks.count(outputs)
            output = first_tensor(outputs)
            unused = self._unused(output)
        except NotImplementedError:
            raise
        except Exception as error:  # the user's model may raise anything
            failed = f"{reason(error)} (in or after {self._inside or 'its forward()'})"
        shared = self._marks.shared()
        layers = tuple(
            replace(layer, after="") if layer.after in shared else layer for layer in self._layers
        )
        return ModelWalk(
            layers=layers, failed=failed, unused=unused,
            outputs=() if output is None else tuple(output.shape),
            ends_in=self._kind_of(self._marks.get(output)), hidden=tuple(hidden(self._model)),
            num_parameters=sum(parameter.numel() for parameter in self._model.parameters()),
        )  # fmt: skip

    def _kind_of(self, mark: str) -> str:
        return next((layer.kind for layer in self._layers if layer.name == mark), mark)

    def _unused(self, output: Tensor | None) -> tuple[str, ...]:
        """Return the names of trainable parameters that no gradient of the output reaches."""
        if output is None or not output.requires_grad:
            return ()
        output.sum().backward()
        return tuple(
            name
            for name, parameter in self._model.named_parameters()
            if parameter.requires_grad and parameter.grad is None
        )

    def _before(self, name: str) -> Callable[[nn.Module, Any], None]:
        def look(module: nn.Module, args: Any) -> None:
            self._inside = f"{name} ({type(module).__name__})"
            layer_input = first_tensor(args)
            if layer_input is None:
                return
            expected = make_fit(module, layer_input)
            self._layers.append(
                LayerSeen(
                    name=name, kind=type(module).__name__, input_shape=tuple(layer_input.shape),
                    expected=expected, after=self._marks.get(layer_input),
                    has_bias=getattr(module, "bias", None) is not None,
                    groups=int(getattr(module, "groups", 1)),
                )
            )  # fmt: skip

        return look

    def _after(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def look(module: nn.Module, args: Any, result: Any) -> None:
            output, layer_input = first_tensor(result), first_tensor(args)
            if output is None or layer_input is None:
                return
            if not self._layers or self._layers[-1].name != name:
                return
            shape = tuple(output.shape)
            self._layers[-1] = replace(
                self._layers[-1], output_shape=shape, sizes=product_sizes(module, shape)
            )
            keeps_mark = isinstance(module, _KEEPS_MARK_LAYERS)
            self._marks.put(output, self._marks.get(layer_input) if keeps_mark else name)

        return look


def first_tensor(value: object) -> Tensor | None:
    """Return the first tensor in a module's arguments or result, or None."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return next((tensor for tensor in map(first_tensor, value) if tensor is not None), None)
    logits = getattr(value, "logits", None)
    return logits if isinstance(logits, Tensor) else None


def make_fit(module: nn.Module, tensor: Tensor) -> int | None:
    """Make a layer take an input; return the features it took before, or None if it fitted."""
    if isinstance(module, nn.Linear) and tensor.shape[-1] != module.in_features:
        expected, module.in_features = module.in_features, tensor.shape[-1]
        module.weight = _empty(module.weight, (module.out_features, tensor.shape[-1]))
        return expected
    if isinstance(module, _CONVS) and module.groups == 1 and tensor.dim() == module.weight.dim():
        if tensor.shape[1] == module.in_channels:
            return None
        expected, module.in_channels = module.in_channels, tensor.shape[1]
        kernel = tuple(module.weight.shape[2:])
        module.weight = _empty(module.weight, (module.out_channels, tensor.shape[1], *kernel))
        return expected
    if isinstance(module, _NORMS) and tensor.dim() > 1 and tensor.shape[1] != module.num_features:
        expected, module.num_features = module.num_features, tensor.shape[1]
        for name in ("weight", "bias"):
            if getattr(module, name) is not None:
                setattr(module, name, _empty(getattr(module, name), (tensor.shape[1],)))
        for name in ("running_mean", "running_var"):
            if getattr(module, name) is not None:
                setattr(module, name, torch.ones(tensor.shape[1], device=tensor.device))
        return expected
    return None


def _empty(like: Tensor, shape: tuple[int, ...]) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, dtype=like.dtype, device=like.device))


def product_sizes(module: nn.Module, output_shape: tuple[int, ...]) -> tuple[int, int, int] | None:
    """Return M, N and K of a layer's matrix product, for each of its groups, or None.

    Args:
        output_shape: sizes of the layer's output.
    """
    if isinstance(module, nn.Linear):
        return math.prod(output_shape[:-1]), module.out_features, module.in_features
    if isinstance(module, _CONVS):
        rows = output_shape[0] * math.prod(output_shape[2:])
        groups = module.groups
        depth = module.in_channels // groups * math.prod(module.kernel_size)
        return rows, module.out_channels // groups, depth
    return None


def hidden(model: nn.Module) -> list[str]:
    """Return the attributes that hold layers in a plain list, tuple or dict, which no optimizer gets."""
    paths = []
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            items = list(value.values()) if isinstance(value, dict) else value
            is_plain = isinstance(items, list | tuple) and not name.startswith("_")
            if is_plain and any(isinstance(item, nn.Module) for item in items):
                paths.append(f"{path}.{name}" if path else name)
    return paths
