"""Record what a script's first steps compute and run, so that two versions can be compared.

    backward()           the value it is called on, in hexadecimal, which keeps every bit
    optimizer.step()     a digest of all gradients, in the order of the optimizer's parameters
    a line of the script its number, in the process's main thread; a compiled function has none

This module must not know what differs between two versions.
"""

import hashlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from types import CodeType, FrameType
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """The losses and gradients of a script's first steps, and which lines have run.

    Attributes:
        losses: each value that backward() was called on, in hexadecimal.
        gradients: one digest of all gradients per step.
        lines: the numbers of the script's lines that have run, from 1.
    """

    losses: tuple[str, ...]
    gradients: tuple[str, ...]
    lines: tuple[int, ...] = ()

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def read(cls, json: Mapping[str, Any]) -> "StepRecord":
        """Return the record that `to_json` has written."""
        return cls(**{name: tuple(values) for name, values in json.items()})

    def first_difference(self, other: "StepRecord") -> str:
        """Return which loss or gradient differs first, in words, or "" if none does."""
        for name, ours, theirs in (
            ("loss", self.losses, other.losses), ("gradients", self.gradients, other.gradients),
        ):  # fmt: skip
            if len(ours) != len(theirs):
                return f"{len(ours)} and {len(theirs)} values of the {name}"
            for step, (value, other_value) in enumerate(zip(ours, theirs, strict=True), 1):
                if value != other_value:
                    return f"the {name} of step {step}"
        return ""


class Recorder:
    """Records the losses and gradients of this process, and the lines that run in this thread.

    Args:
        script: the file name of the script's code.
        num_steps: how many steps to record; the script is ended at the next one.
        stepped: called at each step.

    Attributes:
        is_done: whether that many steps were made.
    """

    def __init__(self, script: str, num_steps: int, stepped: Callable[[], None]) -> None:
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        self._script, self._lines = script, set[int]()
        self._left: dict[CodeType, set[int]] = {}
        """The lines of each function that have not run; one without any runs untraced."""
        self._num_steps, self._stepped, self.is_done = num_steps, stepped, False
        self._losses: list[str] = []
        self._gradients: list[str] = []
        register_optimizer_step_pre_hook(self._step)

    def install(self, patches: Any) -> None:
        """Record losses and lines from now on."""
        import torch

        patches.wrap(torch.autograd, "backward", self._backward)
        sys.settrace(self._entered)

    def _entered(self, frame: FrameType, event: str, arg: object) -> Any:
        code = frame.f_code
        if code.co_filename != self._script:
            return None
        if code not in self._left:
            self._left[code] = {line for _, _, line in code.co_lines() if line}
            self._left[code].discard(frame.f_lineno)  # its def
        return self._ran if self._left[code] else None

    def _ran(self, frame: FrameType, event: str, arg: object) -> Any:
        self._lines.add(frame.f_lineno)
        left = self._left[frame.f_code]
        left.discard(frame.f_lineno)
        frame.f_trace_lines = bool(left)
        return self._ran

    def _backward(self, call: Any) -> Any:
        def recorded(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            loss = tensors if hasattr(tensors, "detach") else next(iter(tensors))
            if loss.numel() == 1:
                self._losses.append(float(loss.detach()).hex())
            return call(tensors, *args, **kwargs)

        return recorded

    def _step(self, optimizer: Any, args: object, kwargs: object) -> None:
        """Record the gradients before a step.

        Raises:
            Finished: enough steps are recorded.
        """
        from .session import Finished

        self._stepped()
        if self.is_done or len(self._gradients) >= self._num_steps:
            self.is_done = True
            raise Finished
        digest = hashlib.sha256()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    digest.update(_bytes(parameter.grad))
        self._gradients.append(digest.hexdigest())

    def record(self) -> StepRecord:
        """Return what is recorded so far."""
        return StepRecord(
            losses=tuple(self._losses), gradients=tuple(self._gradients),
            lines=tuple(sorted(self._lines)),
        )  # fmt: skip


def _bytes(gradient: Any) -> bytes:
    """Return the bits of a gradient; a sparse one is made dense."""
    import torch

    dense = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
    raw: bytes = dense.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return raw
