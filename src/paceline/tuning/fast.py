"""Applies ``--fast`` and related flags to a script's objects before they join the run.

    chosen by hand -> [ trial, or a remembered outcome ] -> Speed -> applied to model, optimizer

It happens before memory is laid out, so the store takes over the strides, and before the
optimizer's step is replaced. This module must not know exchanges or stores.
"""

import importlib.metadata
import re
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ..context import Context
from ..data.feed import apply, move, of_one_batch
from ..data.order import EpochOrder, length_of
from ..errors import ConfigError, FileError
from ..replica.seeding import kept_random_state
from ..speed import Outcome, Speed
from ..system.limits import is_out_of_memory
from ..system.processors import num_cores, processor_name
from . import allocator
from .candidate import Candidate, Feed, TrialSubject, num_samples_of
from .candidates import CANDIDATES
from .remembered import folder, key_of, remembered
from .trial import try_all

_MOST_FED = 256
"""Batches whose samples a trial's loader may draw from: an order may have no end."""
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """How this worker computes from now on.

    Attributes:
        notes: sentences on the outcome of a trial, for the plan.
        could_try: the candidates that a trial would try, if there was no trial.
    """

    speed: Speed
    notes: tuple[str, ...] = ()
    could_try: tuple[str, ...] = ()

    @property
    def rounding(self) -> tuple[str, ...]:
        """The options in effect that round differently from plain code, as text."""
        return tuple(
            candidate.words(getattr(self.speed, candidate.name))
            for candidate in CANDIDATES
            if not candidate.keeps_bits and self.speed.is_chosen(candidate.name)
        )


def settle(subject: TrialSubject, loader: DataLoader[Any], context: Context, fast: str) -> Settled:
    """Choose how to compute, and apply the choice to the script's objects.

    Args:
        subject: the unchanged objects; without a batch or a feed.
        fast: ``auto`` for a trial.

    Raises:
        ConfigError: a choice by hand is not available, or a trial cannot make a step.
    """
    speed = given_by_hand(context, subject)
    notes: tuple[str, ...] = ()
    could_try: tuple[str, ...] = ()
    candidates = [
        candidate
        for candidate in CANDIDATES
        if not context.deterministic or candidate.is_repeatable
    ]
    if fast == "auto":
        speed, notes = _measured(subject, loader, context, speed, candidates)
    elif context.precision == "auto":
        raise ConfigError(
            "--precision auto lets a trial choose 16 bits, but there is no trial: add --fast auto, "
            "or name a precision: --precision bf16"
        )
    else:
        could_try = _could_try(subject, speed, candidates)
    for candidate in CANDIDATES:
        candidate.apply(subject.objects, getattr(speed, candidate.name))
    return Settled(speed=speed, notes=notes, could_try=could_try)


def given_by_hand(context: Context, subject: TrialSubject) -> Speed:
    """The speed that the settings name; ``--precision auto`` begins with fp32.

    A process that an engine started for a worker keeps the memory that a step frees, as torch's
    CUDA allocator does: the time for asking the kernel again differs from run to run.
    """
    precision = context.precision
    keeps_memory = context.is_own_process and subject.is_on_cpu and allocator.may_keep()
    return Speed(
        threads=context.threads or 0,
        keep_memory={"always": True, "never": False}.get(context.keep_memory, keeps_memory),
        optimizer="fused" if context.fused_optimizer else Speed().optimizer,
        channels_last=context.channels_last,
        compile=context.compile,
        precision=precision if precision in ("bf16", "fp16") else "fp32",
        loader_workers=-1 if context.loader_workers is None else context.loader_workers,
        ahead=context.copies_ahead,
    )


def _measured(
    subject: TrialSubject,
    loader: DataLoader[Any],
    context: Context,
    chosen: Speed,
    candidates: Sequence[Candidate],
) -> tuple[Speed, tuple[str, ...]]:
    """The speed that a trial chose, now or in an earlier run, and notes on it."""
    order = EpochOrder(loader, seed=0)
    try:
        batch = _first_batch(loader, order, subject.num_samples)
    except Exception as error:  # the user's sampler, data set or collate_fn may raise anything
        reason = traceback.format_exception_only(error)[-1].strip().splitlines()[-1]
        return chosen, (f"fast: not measured, the first batch could not be loaded: {reason}",)
    try:
        subject = _with_batch(subject, loader, order, batch)
        key = _key(subject, loader, context, chosen, candidates)
    except RuntimeError as error:  # for example, a batch that does not fit on the device
        raise _no_step(error) from error
    is_shared = subject.num_workers > 1
    outcome, is_remembered = remembered(
        key, lambda: _make_trial(subject, chosen, candidates), is_shared=is_shared
    )
    return outcome.speed, (*outcome.lines(), _source(outcome, is_remembered))


def _first_batch(loader: DataLoader[Any], order: EpochOrder, size: int) -> Any:
    """The first samples of ``order``, collated; the script's own draws stay what they were."""
    with kept_random_state():
        positions = order.look(1 if loader.batch_sampler is None else size)
        return next(iter(of_one_batch(loader, positions)))


def _make_trial(subject: TrialSubject, chosen: Speed, candidates: Sequence[Candidate]) -> Outcome:
    """Make the trial; its own training step may fail as the user's would."""
    try:
        return try_all(subject, chosen, candidates)
    except ConfigError:
        raise
    except Exception as error:  # the user's model may raise anything
        raise _no_step(error) from error


def _no_step(error: BaseException) -> ConfigError:
    """The error of a trial whose training step failed."""
    text = str(error).strip().partition("\n")[0]
    if is_out_of_memory(error):
        return ConfigError(
            "--fast auto trains a second copy of model and optimizer, which does not fit into "
            "memory; leave --fast out, or choose by hand (--compile default, --channels-last)"
        )
    return ConfigError(
        f"--fast auto could not make a training step: {type(error).__name__}: {text}; say how the "
        "loop computes its loss: pace.prepare(..., forward=lambda model, batch: loss), or leave "
        "--fast out"
    )


def _with_batch(
    subject: TrialSubject, loader: DataLoader[Any], order: EpochOrder, batch: Any
) -> TrialSubject:
    """The subject with a batch and a feed, which only a trial needs."""
    size, device = subject.num_samples, subject.device
    return replace(
        subject,
        batch=move(batch, device, is_pinned=False),
        num_samples=num_samples_of(batch, size),
        feed=Feed(loader, order.indices[: _MOST_FED * size], size, device),
    )


def _could_try(
    subject: TrialSubject, chosen: Speed, candidates: Sequence[Candidate]
) -> tuple[str, ...]:
    """The names of the candidates that have options here; loads no batch."""
    return tuple(
        candidate.name.replace("_", " ")
        for candidate in candidates
        if not chosen.is_chosen(candidate.name) and candidate.options(subject, chosen)
    )


def made_up_loss(model: nn.Module, batch: Any) -> Tensor:
    """A loss of about the same cost, for a model whose own loss is not known.

    Outputs with a ``loss`` give that. Otherwise it is the cross entropy if there is a label for
    each row of logits, else the mean square of all outputs.

    Raises:
        ConfigError: the outputs hold no tensor that depends on a parameter.
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

    def add_square(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() and tensor.requires_grad:
            squares.append(tensor.float().square().mean())
        return tensor

    apply(add_square, outputs)
    if not squares:
        raise ConfigError(
            f"the model returned {type(outputs).__name__}, which holds no tensor to compute a loss "
            "from; give pace.prepare(..., forward=lambda model, batch: loss)"
        )
    return torch.stack(squares).sum()


def _key(
    subject: TrialSubject,
    loader: DataLoader[Any],
    context: Context,
    chosen: Speed,
    candidates: Sequence[Candidate],
) -> str:
    """A digest of everything that the outcome depends on: model, shapes, torch, machine."""
    shapes: list[tuple[object, ...]] = []

    def add_shape(tensor: Tensor) -> Tensor:
        shapes.append((tuple(tensor.shape), str(tensor.dtype)))
        return tensor

    apply(add_shape, subject.batch)
    options = [(each.name, tuple(each.options(subject, chosen))) for each in candidates]
    model, optimizer = subject.objects.model, subject.objects.optimizer
    parameters = [
        (name, tuple(tensor.shape), str(tensor.dtype), tensor.stride())
        for name, tensor in model.named_parameters()
    ]
    settings = [
        sorted(name for name, value in group.items() if name != "params" and value)
        for group in optimizer.param_groups
    ]
    modules = [type(module).__qualname__ for module in model.modules()]
    text = _ADDRESS.sub("", repr(model))  # addresses differ between workers, and from run to run
    device = subject.device
    machine = processor_name(device)
    return key_of((
        parameters, modules, text, type(optimizer).__qualname__, settings,
        sorted(subject.objects.sizes), subject.num_workers,
        subject.steps_itself, loader.num_workers, type(loader.dataset).__qualname__,
        length_of(loader.dataset), chosen, context.precision == "auto",
        torch.__version__, importlib.metadata.version("paceline"), machine, str(device.type),
        num_cores(), torch.get_num_threads(), shapes, options,
    ))  # fmt: skip


def _source(outcome: Outcome, is_remembered: bool) -> str:
    """Where the outcome comes from, and whether it is kept, as a sentence."""
    measured = f"fast: measured in {outcome.took_s:.0f} s"
    if not outcome.is_steady:
        return (
            f"{measured} while the machine was busy (two measurements disagree), so it is not "
            "remembered"
        )
    if not outcome.is_whole:
        return f"{measured}, but time ran out; it is measured again after a day"
    try:
        path = folder()
    except FileError as error:
        return f"{measured}, not remembered: {error}"
    if is_remembered:
        return f"fast: measured in an earlier run; to measure again, delete it from {path}"
    return f"{measured} and remembered in {path}"
