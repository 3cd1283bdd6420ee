"""Losses and gradients of a script's first steps, so that two versions of it can be compared.

    backward()           the value of what it is called on, as hexadecimal: all its bits
    optimizer.step()     a digest of every gradient, in the order of the optimizers' parameters

This module must not know what is changed between two versions.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """What a script computed in its first steps.

    Attributes:
        losses: each value that backward() was called on; gradients: a digest for each step.
    """

    losses: tuple[str, ...]
    gradients: tuple[str, ...]

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def read(cls, found: Mapping[str, Any]) -> "StepRecord":
        return cls(losses=tuple(found["losses"]), gradients=tuple(found["gradients"]))

    def first_difference(self, other: "StepRecord") -> str:
        """Which loss or gradient differs first, in words; empty: none does."""
        for name, ours, theirs in (
            ("loss", self.losses, other.losses), ("gradients", self.gradients, other.gradients),
        ):  # fmt: skip
            if len(ours) != len(theirs):
                return f"{len(ours)} and {len(theirs)} values of the {name}"
            for step, (one, two) in enumerate(zip(ours, theirs, strict=True), 1):
                if one != two:
                    return f"the {name} of step {step}"
        return ""


class Recorder:
    """Keeps the losses and gradients of this process.

    Args:
        stepped: called at each step.

    Attributes:
        is_done: whether so many steps were made.
    """

    def __init__(self, num_steps: int, stepped: Callable[[], None]) -> None:
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        self._num_steps, self._stepped, self.is_done = num_steps, stepped, False
        self._losses: list[str] = []
        self._gradients: list[str] = []
        register_optimizer_step_pre_hook(self._step)

    def install(self, patches: Any) -> None:
        import torch

        patches.wrap(torch.autograd, "backward", self._backward)

    def _backward(self, call: Any) -> Any:
        def kept(tensors: Any, *args: Any, **given: Any) -> Any:
            one = tensors if hasattr(tensors, "detach") else next(iter(tensors))
            if one.numel() == 1:
                self._losses.append(float(one.detach()).hex())
            return call(tensors, *args, **given)

        return kept

    def _step(self, optimizer: Any, args: object, given: object) -> None:
        """Raises `Finished` where enough is kept."""
        from .session import Finished

        self._stepped()
        if self.is_done or len(self._gradients) >= self._num_steps:
            self.is_done = True
            raise Finished
        digest = hashlib.sha256()
        for group in optimizer.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    digest.update(_bytes(one.grad))
        self._gradients.append(digest.hexdigest())

    def record(self) -> StepRecord:
        return StepRecord(losses=tuple(self._losses), gradients=tuple(self._gradients))


def _bytes(gradient: Any) -> bytes:
    """Its bits."""
    import torch

    whole = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
    raw: bytes = whole.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return raw
