"""A script's model spread over the workers of its run: what is asked, and what cannot be.

    prepare(split="network:2") -> refused by name | a batch -> weights alike -> cut -> SpreadModel

Settings that change a model, or whose workers do not step together, are refused here, each with
what can be done instead. Above 300 lines, since each has its sentence here. This module must not
know how parts are computed.
"""

import inspect
import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from ..context import Context
from ..data.feed import fetch
from ..errors import ConfigError
from ..exchange.through_store import StoreExchange
from ..partition.names import CARRIED, SplitName, read_split
from ..replica.seeding import kept_random_state
from ..system.pages import SMALL_BYTES, is_lean
from ..system.reasons import reason
from ..tuning.allocator import as_in_workers, keep
from ..tuning.candidate import Forward, LossForward
from .base import SpreadModel
from .borders import inputs_of
from .cut import make_cut
from .group import Ranks, SplitGroups, tell_all
from .layered import ColumnModel, make_columns
from .model import PipelinedModel
from .modes import modes_kept
from .shards import ShardedModel
from .trained import BatchLoss, TrainedModel, batch_loss

_WITHOUT_LOSS, _WITH_LOSS = "gpipe", "1f1b"
"""The schedules of a pipeline where nothing is said: all forward first, where the loss is a
script's and stands behind; and one whose micro-batches may differ in size (partition/cuts.py)."""
_SAY_HOW = (
    "and a split model is called once before it is divided: say how the script calls it, "
    "pace.prepare(..., forward=lambda model, batch: loss)"
)
ModelCall = Callable[[nn.Module, Any], Any]
"""(model, batch): calls the model as the script does."""
_REFUSED: Sequence[tuple[Callable[[Context], bool], str, str]] = (
    (
        lambda c: c.protocol.partition("+")[0] != "full-sync",
        "another protocol than full-sync",
        "--protocol full-sync",
    ),
    (
        lambda c: c.steps_together,
        "a step that all make together (closures, optimizer hooks, an "
        "optimizer of your own that keeps numbers in its groups or looks at all parameters)",
        "",
    ),
    (lambda c: c.compile != "none", "--compile", "--compile none"),
    (lambda c: c.precision not in (None, "fp32"), "--precision", "--precision fp32"),
    (lambda c: c.channels_last, "--channels-last", "--no-channels-last"),
    (lambda c: c.compress != "none", "--compress", "--compress none"),
    (lambda c: c.fast != "none", "--fast", "--fast none"),
)
"""What cannot be beside a split, how it is called, and what a run goes on without it by."""


def split_of(asked: str | None, context: Context, exchange: Any) -> SplitName | None:
    """How this run's model is divided; None: each worker has all of it.

    Args:
        asked: what ``prepare`` was told; None: what ``--split`` says.

    Raises:
        ConfigError: the two differ, or this run cannot carry it.
    """
    text = context.split if asked is None else asked
    name, told = (read_split(one, context.workers) for one in (text, context.split))
    if told not in (None, name):
        raise ConfigError(
            f"prepare(split={asked!r}) and --split {context.split}: one run is divided in one way; "
            "leave one of them out"
        )
    if name is None:
        return None
    if exchange is None or exchange.ranks is None:
        raise ConfigError(
            f"split {text!r} runs among ranks, which reach each other's parts: paceline launch "
            f"--workers {name.size} --split {text} SCRIPT, or torchrun --nproc-per-node {name.size}"
        )
    if context.dry_run:
        raise ConfigError(
            f"--dry-run with split {text!r}: where a model is cut is measured by all workers; "
            f"paceline partition TASK -n {name.size} shows the cut, and paceline plan --memory "
            "what each split costs"
        )
    for is_refused, what, without in _REFUSED:
        if is_refused(context):
            had = context.resume and without
            instead = f"{without} (the run that goes on may have it)" if had else "leave it out"
            raise ConfigError(
                f"{what} is not carried where a model is split ({text}): {instead}, or use "
                f"--split data; what runs is full-sync over {', '.join(CARRIED[1:])}"
            )
    return name


def refuse_objects(
    models: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    loader: DataLoader[Any] | None,
    device: torch.device,
    **asked: bool,
) -> None:
    """Raise ConfigError where these objects cannot be split.

    Args:
        asked: other arguments of ``prepare``, by their names, and whether they were given.
    """
    found = [f"prepare({name}=...)" for name, is_given in asked.items() if is_given]
    if len(models) > 1 or len(optimizers) > 1:
        found.append(f"{len(models)} models with {len(optimizers)} optimizers")
    if loader is None:
        found.append("a loop without a loader")
    elif isinstance(loader.dataset, IterableDataset):
        found.append("a stream")
    if device.type != "cpu":
        found.append(f"device {device} (parts are sent between CPUs)")
    if any(isinstance(one, torch.optim.LBFGS) for one in optimizers):
        found.append("an optimizer that calls its closure again (LBFGS)")
    if found:
        raise ConfigError(f"{found[0]} is not carried where a model is split; use --split data")


def spread_over(
    exchange: StoreExchange,
    name: SplitName,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    loader: DataLoader[Any],
    forward: Forward | None,
    mini_batch: int,
) -> SpreadModel:
    """The model, each part on its worker from now on.

    Args:
        mini_batch: samples of a worker's, the most.
    """
    ranks, num_samples = exchange.ranks, partial(_num_samples, exchange)
    assert ranks is not None
    _share_weights(ranks, model)
    refuse_uneven_state(ranks, optimizers)
    _keep_where_small(model)
    call = forward or usual_call(model)
    inputs = partial(_inputs, model, loader, call)
    if name.stage:
        look = partial(_look, model, loader, call, mini_batch)
        groups = SplitGroups(ranks, name)
        return ShardedModel(model, optimizers, groups, name.stage, look, num_samples)
    if name.is_layer:
        groups = SplitGroups(ranks, name)
        columns = make_columns(model, inputs, mini_batch, groups)
        return ColumnModel(model, optimizers, columns, groups, num_samples)
    name, known = _scheduled(name, model, loader, forward)
    with as_in_workers():
        cut = make_cut(model, inputs, mini_batch, ranks, name)
    groups = SplitGroups(ranks, name, cut.order)
    if known is None:
        return PipelinedModel(model, optimizers, cut, groups, num_samples)
    assert isinstance(forward, LossForward)
    made = TrainedModel(model, optimizers, cut, groups, num_samples, known)
    forward.trained = made.train_on
    return made


def _scheduled(
    name: SplitName, model: nn.Module, loader: DataLoader[Any], forward: Forward | None
) -> tuple[SplitName, BatchLoss | None]:
    """With its schedule; the loss, where the last part is to compute it."""
    if name.schedule == _WITHOUT_LOSS:
        return name, None
    if name.schedule:
        return name, known_loss(name, model, loader, forward)
    name = replace(name, schedule=_WITH_LOSS)
    try:
        return name, known_loss(name, model, loader, forward)
    except ConfigError:
        return replace(name, schedule=_WITHOUT_LOSS), None


def _inputs(
    model: nn.Module, loader: DataLoader[Any], call: ModelCall, size: int
) -> tuple[Tensor, ...]:
    """What the script calls the model with, of so many samples."""
    with kept_random_state():
        found: tuple[Tensor, ...] = inputs_of(model, call, _batch(loader, size))
    return found


def _keep_where_small(model: nn.Module) -> None:
    """Where the heap is lean because a model is split, and not by its user."""
    if is_lean(os.environ) and sum(one.nbytes for one in model.parameters()) <= SMALL_BYTES:
        keep(True)


def _look(model: nn.Module, loader: DataLoader[Any], call: ModelCall, mini_batch: int) -> None:
    """One forward pass of so many samples, as an evaluation makes it."""
    with kept_random_state(), _evaluating(model):
        try:
            call(model, _batch(loader, mini_batch))
        except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError) as error:
            raise ConfigError(
                f"{type(model).__name__} does not run on the loader's first batch "
                f"({reason(error)}), {_SAY_HOW}"
            ) from error


def usual_call(model: nn.Module) -> ModelCall:
    """Calls it as a script most likely does with a batch; its loss is left out."""
    signature = inspect.signature(model.forward)  # of its own: a split one takes anything

    def call(_: nn.Module, batch: Any) -> Any:
        for given, named in _ways(batch, signature):
            try:
                signature.bind(*given, **named)
            except TypeError:
                continue
            return model(*given, **named)
        raise ConfigError(
            f"{type(model).__name__} takes {signature}, which no part of the loader's batch "
            f"fits, {_SAY_HOW}"
        )

    return call


def _ways(
    batch: Any, signature: inspect.Signature
) -> Iterator[tuple[Sequence[Any], dict[str, Any]]]:
    """What a model may be called with, the most likely first."""
    if isinstance(batch, Mapping):
        yield (), dict(batch)
        yield (), {name: one for name, one in batch.items() if name in signature.parameters}
    elif isinstance(batch, list | tuple):
        yield batch[:1], {}
        if batch and isinstance(batch[0], list | tuple):
            yield batch[0], {}
        yield batch[:-1], {}
    else:
        yield (batch,), {}


def _num_samples(exchange: StoreExchange) -> int:
    """Of this worker's mini-batch."""
    grant = exchange.grant()
    return sum(one.num_samples for one in grant.leases) if grant is not None else 0


def known_loss(
    name: SplitName, model: nn.Module, loader: DataLoader[Any], forward: Forward | None
) -> BatchLoss:
    """The loss, which the last part computes.

    Raises:
        ConfigError: it cannot.
    """
    try:
        if not isinstance(forward, LossForward):
            raise ConfigError("a script's loss stands behind model(x)")
        with kept_random_state():
            every = partial(_batch, loader, is_spread=True)
            return batch_loss(model, forward.loss, every)
    except ConfigError as error:
        raise ConfigError(
            f"split {name}: {name.schedule} needs the loss of each micro-batch in the last part, "
            f"and {error}; write {replace(name, schedule=_WITHOUT_LOSS)}"
        ) from None


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Every module in evaluation mode; afterwards each in its own again."""
    with modes_kept(model):
        model.eval()
        yield


def _batch(loader: DataLoader[Any], size: int, *, is_spread: bool = False) -> Any:
    """The first samples of the data set, as the loader would make a batch of them.

    Args:
        is_spread: not the first, but from all of it.
    """
    dataset: Any = loader.dataset
    stride = max(1, len(dataset) // size) if is_spread else 1
    indices = [index * stride % len(dataset) for index in range(size)]
    return loader.collate_fn(fetch(dataset, indices))


def _share_weights(ranks: Ranks, model: nn.Module) -> None:
    """The first worker's become everyone's, as they do where nothing is split."""
    with torch.no_grad():
        for one in (*model.parameters(), *model.buffers()):
            held = one.detach().contiguous()
            flat = held.view(-1).view(torch.uint8) if held.numel() else None
            if flat is not None:
                ranks.share(flat).wait()
                one.copy_(held)


def refuse_uneven_state(ranks: Ranks, optimizers: Sequence[Optimizer]) -> None:
    """Weights are shared, optimizer state is not: each worker steps its part with its own.

    Raises:
        ConfigError: some workers have loaded it, and others have not.
    """
    held = [
        [
            sorted(map(str, one.state.get(x, ())))
            for group in one.param_groups
            for x in group["params"]
        ]
        for one in optimizers
    ]
    every = tell_all(ranks.everyone, zlib.crc32(json.dumps(held).encode()))
    other = next((number for number, one in enumerate(every) if one != every[0]), 0)
    if other:
        raise ConfigError(
            f"worker {other} begins with state of other parameters in its optimizer than worker 0 "
            "(momentum, moments), and where a model is split each steps its part with its own: "
            "optimizer.load_state_dict(...) in all workers alike, not if pace.is_main alone"
        )
