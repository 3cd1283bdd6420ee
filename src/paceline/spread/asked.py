"""Spread a script's model over the workers of its run, or refuse what cannot be split.

    prepare(split="network:2") -> refused by name | a batch -> equal weights -> cut -> SpreadModel

Settings that change the model, or whose workers do not step together, are refused here, each with
an alternative. Above 300 lines, since each has its own message here. This module must not know how
parts are computed.
"""

import inspect
import json
import os
import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from .borders import inputs_of, sent_bytes
from .cut import make_cut
from .group import Ranks, SplitGroups, tell_all
from .layered import ColumnModel, make_columns
from .model import PipelinedModel
from .modes import modes_kept
from .shards import ShardedModel
from .trained import BatchLoss, TrainedModel, batch_loss

_WITHOUT_LOSS, _WITH_LOSS = "gpipe", "1f1b"
"""The default schedules of a pipeline: all forward passes first, where the loss line of a script
follows them; and one whose micro-batches may differ in size (partition/cuts.py)."""
_SAY_HOW = (
    "and a split model is called once before it is divided: say how the script calls it, "
    "pace.prepare(..., forward=lambda model, batch: loss)"
)
ModelCall = Callable[[nn.Module, Any], Any]
"""Calls a model with a batch, (model, batch), as the script does."""
_REFUSED: Sequence[tuple[Callable[[Context], bool], str, str]] = (
    (
        lambda c: c.protocol.partition("+")[0] != "full-sync",
        "another protocol than full-sync",
        "--protocol full-sync",
    ),
    (
        lambda c: c.steps_together,
        "a step that all make together (closures, optimizer hooks, your own "
        "optimizer that keeps numbers in its groups or reads all parameters)",
        "",
    ),
    (lambda c: c.compile != "none", "--compile", "--compile none"),
    (lambda c: c.precision not in (None, "fp32"), "--precision", "--precision fp32"),
    (lambda c: c.channels_last, "--channels-last", "--no-channels-last"),
    (lambda c: c.compress != "none", "--compress", "--compress none"),
    (lambda c: c.fast != "none", "--fast", "--fast none"),
)
"""Settings that no split supports: a test for each, its name, and the flag of a run without it."""


def split_of(argument: str | None, context: Context, exchange: Any) -> SplitName | None:
    """Return how this run's model is divided; None: each worker has a whole copy.

    Args:
        argument: ``split`` of ``prepare``; None: ``--split`` decides.

    Raises:
        ConfigError: the two differ, or this run does not support the split.
    """
    text = context.split if argument is None else argument
    name, flag = (read_split(split, context.workers) for split in (text, context.split))
    if flag not in (None, name):
        raise ConfigError(
            f"prepare(split={argument!r}) and --split {context.split}: one run is divided in one "
            "way; leave one of them out"
        )
    if name is None:
        return None
    if exchange is None or exchange.ranks is None:
        raise ConfigError(
            f"split {text!r} needs ranks that can send each other tensors: paceline launch "
            f"--workers {name.size} --split {text} SCRIPT, or torchrun --nproc-per-node {name.size}"
        )
    if context.dry_run:
        raise ConfigError(
            f"--dry-run with split {text!r}: all workers measure where to cut the model; "
            f"paceline partition TASK -n {name.size} shows the cut, and paceline plan --memory "
            "what each split costs"
        )
    for is_refused, what, without in _REFUSED:
        if is_refused(context):
            is_resumed = context.resume and without
            instead = f"{without} (the resumed run may have it)" if is_resumed else "leave it out"
            raise ConfigError(
                f"{what} is not supported with a split model ({text}): {instead}, or use "
                f"--split data; full-sync over {', '.join(CARRIED[1:])} is supported"
            )
    return name


def refuse_objects(
    models: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    loader: DataLoader[Any] | None,
    device: torch.device,
    **arguments: bool,
) -> None:
    """Raise ConfigError where these objects cannot be split.

    Args:
        arguments: whether other arguments of ``prepare`` were given, by their names.
    """
    refused = [f"prepare({name}=...)" for name, is_given in arguments.items() if is_given]
    if len(models) > 1 or len(optimizers) > 1:
        refused.append(f"{len(models)} models with {len(optimizers)} optimizers")
    if loader is None:
        refused.append("a loop without a loader")
    elif isinstance(loader.dataset, IterableDataset):
        refused.append("a stream")
    if device.type != "cpu":
        refused.append(f"device {device} (parts are sent between CPUs)")
    if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in optimizers):
        refused.append("an optimizer that calls its closure again (LBFGS)")
    if refused:
        raise ConfigError(f"{refused[0]} is not supported with a split model; use --split data")


def spread_over(
    exchange: StoreExchange,
    name: SplitName,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    loader: DataLoader[Any],
    forward: Forward | None,
    mini_batch: int,
) -> SpreadModel:
    """Divide the model over the workers, and return this worker's side of it.

    Args:
        forward: computes the script's loss, (model, batch), where it is known.
        mini_batch: samples of the largest mini-batch of a worker.
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
    sent = sent_bytes(model, cut.borders, mini_batch, name, known.target)
    cut = replace(cut, sent_bytes=sent)
    spread = TrainedModel(model, optimizers, cut, groups, num_samples, known)
    forward.trained = spread.train_on
    return spread


def _scheduled(
    name: SplitName, model: nn.Module, loader: DataLoader[Any], forward: Forward | None
) -> tuple[SplitName, BatchLoss | None]:
    """Add a schedule to a split; return it, and the loss if the last part is to compute it."""
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
    """Return what the script calls the model with, for a number of samples."""
    with kept_random_state():
        args: tuple[Tensor, ...] = inputs_of(model, call, _batch(loader, size))
    return args


def _keep_where_small(model: nn.Module) -> None:
    """Keep freed memory for a small model, if the heap is lean because of the split alone."""
    if is_lean(os.environ) and sum(p.nbytes for p in model.parameters()) <= SMALL_BYTES:
        keep(True)


def _look(model: nn.Module, loader: DataLoader[Any], call: ModelCall, mini_batch: int) -> None:
    """Run one forward pass on a mini-batch, as an evaluation does."""
    with kept_random_state(), _evaluating(model):
        try:
            call(model, _batch(loader, mini_batch))
        except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError) as error:
            raise ConfigError(
                f"{type(model).__name__} does not run on the loader's first batch "
                f"({reason(error)}), {_SAY_HOW}"
            ) from error


def usual_call(model: nn.Module) -> ModelCall:
    """Return a function that calls the model with a batch as a script most likely does."""
    signature = inspect.signature(model.forward)  # its own: the one of a split model takes anything

    def call(_: nn.Module, batch: Any) -> Any:
        for args, kwargs in _likely_calls(batch, signature):
            try:
                signature.bind(*args, **kwargs)
            except TypeError:
                continue
            return model(*args, **kwargs)
        raise ConfigError(
            f"{type(model).__name__} takes {signature}, which no part of the loader's batch "
            f"fits, {_SAY_HOW}"
        )

    return call


def _likely_calls(
    batch: Any, signature: inspect.Signature
) -> Iterator[tuple[Sequence[Any], dict[str, Any]]]:
    """Yield arguments that a model may be called with, the most likely first."""
    if isinstance(batch, Mapping):
        yield (), dict(batch)
        yield (), {name: value for name, value in batch.items() if name in signature.parameters}
    elif isinstance(batch, list | tuple):
        yield batch[:1], {}
        if batch and isinstance(batch[0], list | tuple):
            yield batch[0], {}
        yield batch[:-1], {}
    else:
        yield (batch,), {}


def _num_samples(exchange: StoreExchange) -> int:
    """Return the samples of this worker's mini-batch, 0 where it has none."""
    grant = exchange.grant()
    return sum(lease.num_samples for lease in grant.leases) if grant is not None else 0


def known_loss(
    name: SplitName, model: nn.Module, loader: DataLoader[Any], forward: Forward | None
) -> BatchLoss:
    """Return the loss, for the last part to compute.

    Raises:
        ConfigError: the last part cannot compute it.
    """
    try:
        if not isinstance(forward, LossForward):
            raise ConfigError("a script's loss comes after model(x)")
        with kept_random_state():
            batch = partial(_batch, loader, is_spread=True)
            return batch_loss(model, forward.loss, batch)
    except ConfigError as error:
        raise ConfigError(
            f"split {name}: {name.schedule} needs the loss of each micro-batch in the last part, "
            f"and {error}; write {replace(name, schedule=_WITHOUT_LOSS)}"
        ) from None


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Put every module into evaluation mode, and back on exit."""
    with modes_kept(model):
        model.eval()
        yield


def _batch(loader: DataLoader[Any], size: int, *, is_spread: bool = False) -> Any:
    """Collate the first samples of the data set as the loader would.

    Args:
        is_spread: whether samples from all over the data set are taken instead of the first.
    """
    dataset: Any = loader.dataset
    indices: Iterable[int] = range(size)
    if is_spread and size <= len(dataset):  # not at equal distances: labels may repeat at these
        indices = random.Random(0).sample(range(len(dataset)), size)
    return loader.collate_fn(fetch(dataset, [index % len(dataset) for index in indices]))


def _share_weights(ranks: Ranks, model: nn.Module) -> None:
    """Copy the first worker's weights to all, as where nothing is split."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            weights = tensor.detach().contiguous()
            flat = weights.view(-1).view(torch.uint8) if weights.numel() else None
            if flat is not None:
                ranks.share(flat).wait()
                tensor.copy_(weights)


def refuse_uneven_state(ranks: Ranks, optimizers: Sequence[Optimizer]) -> None:
    """Check that all workers begin with the same optimizer state, which is not copied to all.

    Raises:
        ConfigError: some workers have loaded it, and others have not.
    """
    keys = [
        [
            sorted(map(str, optimizer.state.get(parameter, ())))
            for group in optimizer.param_groups
            for parameter in group["params"]
        ]
        for optimizer in optimizers
    ]
    checksums = tell_all(ranks.everyone, zlib.crc32(json.dumps(keys).encode()))
    other = next((number for number, crc in enumerate(checksums) if crc != checksums[0]), 0)
    if other:
        raise ConfigError(
            f"the optimizer of worker {other} begins with state (momentum, moments) of other "
            "parameters than that of worker 0, but with a split model each worker steps its part "
            "with its own state: call optimizer.load_state_dict(...) in all workers, not only if "
            "pace.is_main"
        )
