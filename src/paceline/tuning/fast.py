"""What ``--fast`` and the flags beside it make of a script's objects, before they join the run.

    given by hand -> [ trial, or what one found before ] -> Speed -> applied to model, optimizer

It happens before memory is laid out, so the store takes over whatever strides there are then, and
before the optimizer's step is replaced. This module must not know exchanges or stores.
"""

import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ..context import Context
from ..data.feed import apply, move
from ..errors import ConfigError, FileError
from ..speed import Outcome, Speed
from ..system.limits import is_out_of_memory
from ..system.processors import num_cores, processor_name
from . import allocator
from .candidate import Candidate, Feed, TrialSubject, host_batch, num_samples_of
from .candidates import CANDIDATES
from .remembered import folder, key_of, remembered
from .trial import try_all


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """How this worker computes from now on.

    Attributes:
        notes: sentences on what was found, for the plan.
        could_try: what a trial would try, where none was asked for.
    """

    speed: Speed
    notes: tuple[str, ...] = ()
    could_try: tuple[str, ...] = ()

    @property
    def rounding(self) -> tuple[str, ...]:
        """What is in effect that rounds otherwise than plain code does, in words."""
        return tuple(
            one.words(getattr(self.speed, one.name))
            for one in CANDIDATES
            if not one.keeps_bits and self.speed.is_chosen(one.name)
        )


def settle(subject: TrialSubject, loader: DataLoader[Any], context: Context, fast: str) -> Settled:
    """Choose how to compute, and put it into effect on the script's objects.

    Args:
        subject: the objects, as they are; without a batch or a feed.

    Raises:
        ConfigError: what was chosen by hand cannot be had; or a trial cannot make a step.
    """
    given = given_by_hand(context, subject)
    notes: tuple[str, ...] = ()
    could_try: tuple[str, ...] = ()
    if fast == "auto":
        every = [one for one in CANDIDATES if not context.deterministic or one.is_repeatable]
        outcome, was_there = _found(subject, loader, context, given, every)
        given = outcome.speed
        notes = (*outcome.lines(), _source(outcome, was_there))
    elif context.precision == "auto":
        raise ConfigError(
            "--precision auto lets a trial try 16 bits, and no trial was asked for: add --fast "
            "auto, or name a precision: --precision bf16"
        )
    else:
        could_try = _could_try(subject, given)
    for one in CANDIDATES:
        one.apply(subject.objects, getattr(given, one.name))
    return Settled(speed=given, notes=notes, could_try=could_try)


def given_by_hand(context: Context, subject: TrialSubject) -> Speed:
    """The speed that the settings name; ``--precision auto`` begins with fp32.

    A process that an engine started for a worker keeps the memory that a step frees, as torch's
    allocator for CUDA does: asking the kernel for it again takes another time in every run.
    """
    precision = context.precision
    may_keep = context.is_own_process and subject.is_on_cpu and allocator.may_keep()
    return Speed(
        threads=context.threads or 0,
        keep_memory={"always": True, "never": False}.get(context.keep_memory, may_keep),
        optimizer="fused" if context.fused_optimizer else Speed().optimizer,
        channels_last=context.channels_last,
        compile=context.compile,
        precision=precision if precision in ("bf16", "fp16") else "fp32",
        loader_workers=-1 if context.loader_workers is None else context.loader_workers,
        ahead=context.copies_ahead,
    )


def _found(
    subject: TrialSubject,
    loader: DataLoader[Any],
    context: Context,
    given: Speed,
    every: Sequence[Candidate],
) -> tuple[Outcome, bool]:
    try:
        subject = _measured_on(subject, loader)
        key = _key(subject, loader, context, given, every)
    except RuntimeError as error:  # a batch that does not fit on the device, for one
        raise _no_step(error) from error
    is_shared = subject.num_workers > 1
    return remembered(key, lambda: _tried(subject, given, every), is_shared=is_shared)


def _tried(subject: TrialSubject, given: Speed, every: Sequence[Candidate]) -> Outcome:
    """What a trial finds; it takes a step of its own, which may fail as the user's would."""
    try:
        return try_all(subject, given, every)
    except ConfigError:
        raise
    except Exception as error:  # the user's model may raise anything
        raise _no_step(error) from error


def _no_step(error: BaseException) -> ConfigError:
    """Why a trial has no step to measure."""
    text = str(error).strip().partition("\n")[0]
    if is_out_of_memory(error):
        return ConfigError(
            "--fast auto trains a second copy of model and optimizer, and there is no memory for "
            "it; leave --fast out, or choose by hand (--compile default, --channels-last)"
        )
    return ConfigError(
        f"--fast auto could not make a training step of its own: {type(error).__name__}: {text}"
        "; say how the loop computes its loss: pace.prepare(..., forward=lambda model, batch: "
        "loss), or leave --fast out"
    )


def _measured_on(subject: TrialSubject, loader: DataLoader[Any]) -> TrialSubject:
    """The subject with a batch and a feed, which only a trial needs."""
    size, device = subject.num_samples, subject.device
    host = host_batch(loader, size)
    return replace(
        subject,
        batch=move(host, device, is_pinned=False),
        num_samples=num_samples_of(host, size),
        feed=Feed(loader, size, device),
    )


def _could_try(subject: TrialSubject, given: Speed) -> tuple[str, ...]:
    """The candidates that have something to try here; no batch is loaded to find out."""
    rest = [one for one in CANDIDATES if not given.is_chosen(one.name)]
    names = {one.name: one.options(subject, given) for one in rest}
    return tuple(name.replace("_", " ") for name, values in names.items() if values)


def made_up_loss(model: nn.Module, batch: Any) -> Tensor:
    """A loss for a model whose own is not known: of the same cost, nearly.

    Cross entropy where there is a label for each row of logits, else the mean square of all that
    the model returns; what has a ``loss`` of its own is believed.
    """
    if isinstance(batch, dict):
        outputs = model(**batch)
        targets = batch.get("labels")
    else:
        inputs, *rest = batch if isinstance(batch, list | tuple) else (batch,)
        outputs = model(inputs)
        targets = rest[0] if rest else None
    loss = getattr(outputs, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    if isinstance(outputs, Tensor) and isinstance(targets, Tensor) and outputs.ndim == 2:
        is_labels = targets.dtype == torch.int64 and targets.shape == outputs.shape[:1]
        if is_labels:
            return nn.functional.cross_entropy(outputs.float(), targets)
    squares: list[Tensor] = []

    def square(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() and tensor.requires_grad:
            squares.append(tensor.float().square().mean())
        return tensor

    apply(square, outputs)
    if not squares:
        raise ConfigError(
            f"the model returned {type(outputs).__name__}, and there is nothing in it to make a "
            "loss of; give pace.prepare(..., forward=lambda model, batch: loss)"
        )
    return torch.stack(squares).sum()


def _key(
    subject: TrialSubject,
    loader: DataLoader[Any],
    context: Context,
    given: Speed,
    every: Sequence[Candidate],
) -> str:
    """Everything that the outcome depends on: the model, its shapes, torch, the machine."""
    shapes: list[tuple[object, ...]] = []

    def note(tensor: Tensor) -> Tensor:
        shapes.append((tuple(tensor.shape), str(tensor.dtype)))
        return tensor

    apply(note, subject.batch)
    options = [(one.name, tuple(one.options(subject, given))) for one in every]
    model, optimizer = subject.objects.model, subject.objects.optimizer
    tensors = [(n, tuple(t.shape), str(t.dtype), t.stride()) for n, t in model.named_parameters()]
    settings = [
        sorted(k for k, v in g.items() if k != "params" and v) for g in optimizer.param_groups
    ]
    modules = [type(module).__qualname__ for module in model.modules()]
    device = subject.device
    machine = processor_name(device)
    return key_of((
        tensors, modules, repr(model), type(optimizer).__qualname__, settings,
        sorted(subject.objects.sizes), subject.num_workers,
        subject.steps_itself, loader.num_workers, type(loader.dataset).__qualname__,
        len(loader.dataset), given, context.precision == "auto",  # type: ignore[arg-type]  # map-style
        torch.__version__, importlib.metadata.version("paceline"), machine, str(device.type),
        num_cores(), torch.get_num_threads(), shapes, options,
    ))  # fmt: skip


def _source(outcome: Outcome, was_there: bool) -> str:
    if not outcome.is_steady:
        return (
            f"fast: measured in {outcome.took_s:.0f} s, in a moment in which the machine was busy "
            "with something else (two measurements disagree): not remembered"
        )
    if not outcome.is_whole:
        return f"fast: measured in {outcome.took_s:.0f} s, and not to the end; again after a day"
    try:
        where = folder()
    except FileError as error:
        return f"fast: measured in {outcome.took_s:.0f} s, and not remembered: {error}"
    if was_there:
        return f"fast: as it was measured before; to measure again, delete it from {where}"
    return f"fast: measured in {outcome.took_s:.0f} s, and remembered in {where}"
