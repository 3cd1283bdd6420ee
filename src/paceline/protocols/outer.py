"""The outer optimizer: how the mean difference of local steps makes the next version.

    worker 0  -step-step-step-|  w - w_0          each took its own steps from w
    worker 1  -step--step-step|  w - w_1          Delta = sum_i (m_i/m) (w - w_i)
    worker 2  -step-step-step-|  w - w_2          w <- outer(w, Delta), the next version

After H local steps the mean of what they subtracted from w is used as a gradient:

    none               w <- w - Delta                                  plain averaging
    sgd:LR             w <- w - LR Delta                               sgd:1 is plain averaging
    momentum:LR,B      u <- B u + Delta;  w <- w - LR u                u is Delta at first
    nesterov:LR,B      u <- B u + Delta;  w <- w - LR (Delta + B u)

They are torch's own SGD on Delta, so momentum works as there; u belongs to the run and not to a
worker: it is in the store beside the parameters and in checkpoints, and survives every death.
Buffers, such as those of batch norm, are only averaged. A frozen parameter has Delta = 0 and stays;
one that is frozen while u is not 0 still moves by the rest of u.

Source: A. Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models",
arXiv 2311.08105, 2023, algorithm 1 (Nesterov, 0.7, 0.9); S. J. Reddi et al., "Adaptive Federated
Optimization", ICLR 2021, algorithm 1, for the frame. Changed: Delta is weighted by samples, as in
local-sgd. This module must not know protocols, tensors or clocks.
"""

import math
from dataclasses import dataclass

from ..errors import ConfigError, unknown

SPELLINGS = {
    "none": "none",
    "sgd": "sgd:LR",
    "momentum": "momentum:LR,B",
    "nesterov": "nesterov:LR,B",
}
"""Name -> its spelling."""
_WANTED = {
    "none": "takes no number",
    "sgd": "needs a number, the learning rate LR > 0",
    "momentum": "needs two numbers, the learning rate LR > 0 and the momentum 0 < B < 1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterOptimizer:
    """SGD on the mean difference.

    Attributes:
        name: of the table above.
        lr: above 0; 1 without momentum gives the mean of the parameters.
        momentum: B, at least 0 and below 1.
    """

    name: str = "none"
    lr: float = 1.0
    momentum: float = 0.0

    @property
    def is_nesterov(self) -> bool:
        return self.name == "nesterov"

    def __str__(self) -> str:
        numbers = [_number(value) for value in (self.lr, self.momentum)]
        shown = numbers[: SPELLINGS[self.name].count(",") + (":" in SPELLINGS[self.name])]
        return ":".join([self.name, *([",".join(shown)] if shown else [])])


AVERAGING = OuterOptimizer()


def parse_outer(text: str) -> OuterOptimizer:
    """Return the outer optimizer that ``name`` or ``name:numbers`` means.

    Raises:
        ConfigError: the name is unknown, or a number is missing, invalid or out of range.

    Example:
        >>> parse_outer("nesterov:0.7,0.9").momentum
        0.9
        >>> str(parse_outer("sgd:1.0"))
        'sgd:1'
    """
    name, colon, rest = text.strip().partition(":")
    if name not in SPELLINGS:
        raise unknown("outer optimizer", name, list(SPELLINGS.values()))
    try:
        numbers = [float(part) for part in rest.split(",")] if colon else []
    except ValueError:
        raise _refused(text, name) from None
    if len(numbers) != {"none": 0, "sgd": 1}.get(name, 2):
        raise _refused(text, name)
    if numbers and not 0.0 < numbers[0] < math.inf:
        raise _refused(text, name)
    if len(numbers) > 1 and not 0.0 < numbers[1] < 1.0:
        raise _refused(text, name)
    return OuterOptimizer(name=name, **dict(zip(("lr", "momentum"), numbers, strict=False)))


def _refused(text: str, name: str) -> ConfigError:
    example = {"none": "none", "sgd": "sgd:1", "momentum": "momentum:1,0.5"}
    return ConfigError(
        f"outer {SPELLINGS[name]} {_WANTED.get(name, _WANTED['momentum'])}, got {text!r}; write "
        f"for example {example.get(name, 'nesterov:0.7,0.9')}"
    )


def _number(value: float) -> str:
    short = f"{value:g}"
    return short if float(short) == value else repr(value)
