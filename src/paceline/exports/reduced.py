"""The same model in fewer bits: half precision, or int8 weights.

    fp16, bf16   weights and arithmetic; inputs are cast on the way in, outputs back to float32
    int8         the weights of linear and convolution layers, one scale an output channel:
                     w ~ q * scale,   scale = max |w| / 127,   q in -127 .. 127
                 other code that reads such a weight reads q * scale; layers that compute something
                 else than their class does (hooks, a forward of their own) stay as they are;
                 arithmetic stays float32: the file is a quarter as large, and no faster

Symmetric quantisation by channel is that of Krishnamoorthi, "Quantizing deep convolutional networks
for efficient inference" (2018), section 2. torch.ao.quantization, which would also compute in
integers, is deprecated and to be removed; what stands here are plain modules, which every format
can write. This module must not know formats.
"""

import copy
from enum import Enum

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..system.reasons import reason


class Precision(Enum):
    """How many bits a number has."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    INT8 = "int8"


_DTYPES = {Precision.FP16: torch.float16, Precision.BF16: torch.bfloat16}


class _Half(nn.Module):
    """A model in half precision behind float32 inputs and outputs."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = model.to(dtype)
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        if x.is_floating_point():  # tokens are numbers of rows
            x = x.to(self.dtype)
        outputs: Tensor = self.model(x).to(torch.float32)
        return outputs


class _Int8Layer(nn.Module):
    """A layer that holds its weights as int8."""

    quantised: Tensor
    scale: Tensor

    def __init__(self, layer: nn.Linear | nn.Conv2d) -> None:
        super().__init__()
        quantised, scale = quantise(layer.weight.detach())
        self.register_buffer("quantised", quantised)
        self.register_buffer("scale", scale)
        self.bias = layer.bias

    @property
    def weight(self) -> Tensor:
        """The weights as numbers, for whatever reads them."""
        return self.quantised.to(self.scale.dtype) * self.scale


class _Int8Linear(_Int8Layer):
    """A linear layer in int8."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


class _Int8Conv2d(_Int8Layer):
    """A convolution in int8."""

    def __init__(self, layer: nn.Conv2d) -> None:
        super().__init__(layer)
        self.stride = layer.stride
        self.padding = layer.padding
        self.dilation = layer.dilation
        self.groups = layer.groups

    def forward(self, x: Tensor) -> Tensor:
        return torch.conv2d(
            x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups
        )


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Weights (out, ...) as int8 of the same shape, and the scale of each output channel.

    Invariant: ``|weight - int8 * scale| <= scale / 2``, held by tests/exports/test_reduced.py.
    """
    axes = tuple(range(1, weight.dim()))
    largest = weight.abs().amax(dim=axes, keepdim=True)
    scale = torch.where(largest > 0, largest / 127, torch.ones_like(largest))
    return torch.round(weight / scale).to(torch.int8), scale


def reduced(model: nn.Module, precision: Precision, inputs: tuple[Tensor, ...]) -> nn.Module:
    """A copy of the model with fewer bits; the model itself for fp32.

    Raises:
        ConfigError: the model has no layer for int8, more than one input, or does not run so here.
    """
    if precision is Precision.FP32:
        return model
    if len(inputs) != 1:
        raise ConfigError(
            f"--precision {precision.value} is for models with one input, got {len(inputs)}"
        )
    copied = copy.deepcopy(model)
    if precision is Precision.INT8:
        smaller = _with_int8(copied)
        if not any(isinstance(module, _Int8Layer) for module in smaller.modules()):
            raise ConfigError(
                "--precision int8: the model has no nn.Linear or nn.Conv2d layer, or none but in "
                "nn.TransformerEncoderLayer(batch_first=True) or with a hook or a forward of its "
                "own, which stay as they are"
            )
    else:
        smaller = _Half(copied, _DTYPES[precision])
    try:
        with torch.no_grad():
            smaller(*inputs)
    except Exception as error:  # a kernel that is missing has no error of its own
        raise ConfigError(
            f"--precision {precision.value} does not run on {inputs[0].device}: {reason(error)}"
        ) from error
    return smaller.eval()


def _with_int8(module: nn.Module) -> nn.Module:
    """The module with its layers replaced; only torch's own classes, which are known whole."""
    if type(module) is nn.Linear:
        return module if _is_altered(module) else _Int8Linear(module)
    if type(module) is nn.Conv2d and module.padding_mode == "zeros":
        is_kept = isinstance(module.padding, str) or _is_altered(module)
        return module if is_kept else _Int8Conv2d(module)
    if isinstance(module, nn.TransformerEncoderLayer) and module.self_attn.batch_first:
        return module  # torch's own kernel of it reads the weights of its layers
    for name, child in module.named_children():
        setattr(module, name, _with_int8(child))
    return module


def _is_altered(layer: nn.Module) -> bool:
    """Whether a call of the layer does more than its class says."""
    return bool(layer._forward_pre_hooks or layer._forward_hooks or "forward" in vars(layer))
