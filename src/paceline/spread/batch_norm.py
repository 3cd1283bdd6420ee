"""Batch norm in a model in parts: one layer computes the mini-batches of all workers of a copy.

    a pass of worker k's mini-batch    statistics of k -> buffers -> the pass -> statistics of k
    an update                          buffers = sum over k of share k x statistics of k

So between updates each worker has running statistics of its own, of which an update takes the mean,
as where each has the whole model. This module must not know parts.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..store.sums import carried, has_mean


def training_batch_norms(module: nn.Module, *, is_frozen: bool = True) -> tuple[str, ...]:
    """Return the names of batch norm layers in training.

    Args:
        is_frozen: whether layers in evaluation mode stay in it; otherwise ``module.train()`` is yet
            to come.
    """
    return tuple(
        name
        for name, layer in module.named_modules()
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and (layer.training or not is_frozen)
    )


def refuse_without_statistics(module: nn.Module) -> None:
    """Raise ConfigError where batch norm layers have no running statistics."""
    names = [
        name
        for name, layer in module.named_modules()
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.running_mean is None
    ]
    if names:
        raise ConfigError(
            f"{', '.join(names[:3])}: batch norm without running statistics looks at the whole "
            "batch in evaluation, too, of which parts would compute something else; give it "
            "track_running_stats=True, or use --split data"
        )


def refuse_batch_norm(names: Sequence[str], *, instead: str) -> None:
    """Raise ConfigError where there are batch norm layers in training.

    Args:
        instead: the splits that can compute them.
    """
    if names:
        raise ConfigError(
            f"{', '.join(names[:3])}: batch norm looks at the whole batch, so in parts of one it "
            "would compute something else; use nn.GroupNorm, freeze it by .eval() before "
            f"prepare() and after each model.train(), or use --split {instead}"
        )


class NormStatistics:
    """The running statistics of a copy's batch norm layers, for the mini-batches of each worker.

    Torch counts no version where a pass writes into statistics, so they are written here without
    one, too: a pass's graph saves them, but its backward pass in training does not read them.

    Args:
        layers: those that this worker computes.
        buffers: of all these layers, in the order of parts, and whether this worker computes them;
            of the others it has copies, which a script may read.

    Attributes:
        has_edits: whether a script has changed any of them since the last update.
    """

    def __init__(self, layers: Sequence[nn.Module], buffers: Sequence[tuple[Tensor, bool]]) -> None:
        self._layers, self.buffers = layers, buffers
        self._own = [buffer for buffer, is_own in buffers if is_own]
        self._of: dict[int, list[Tensor]] = {}
        """The statistics of each worker whose mini-batches have changed them since the update."""
        self.restart()

    def restart(self) -> None:
        """All workers have the statistics that the buffers hold now."""
        self._of.clear()
        self._standing: list[Tensor] | None = None
        self._held_of: int | None = None
        """The worker whose statistics the buffers hold; None: those of the update."""
        self.has_edits = False
        self._versions = self._now()

    def _now(self) -> list[int]:
        return [buffer._version for buffer, _ in self.buffers]

    def look(self) -> None:
        """See whether a script has changed buffers since this object last did."""
        if self._now() != self._versions:
            self.restart()
            self.has_edits = True

    @contextmanager
    def of(self, worker: int) -> Iterator[None]:
        """A block with a pass of a worker's mini-batch, which may change its statistics.

        Raises:
            ConfigError: a backward pass would read the statistics of another worker.
        """
        self.look()
        is_frozen = torch.is_grad_enabled() and any(not layer.training for layer in self._layers)
        if is_frozen and self._of:
            raise ConfigError(
                "batch norm computes in evaluation mode, with gradients, after it has computed in "
                "training mode in the same update, which is not supported in parts of a model: use "
                "torch.no_grad(), or --split data"
            )
        if self._standing is None:
            self._standing = self._copies()
        if (wanted := worker if worker in self._of else None) != self._held_of:
            self._hold(self._of.get(worker, self._standing), wanted)
        yield
        if self._now() != self._versions:
            self._of[worker], self._held_of = self._copies(), worker
            self._versions = self._now()

    def _copies(self) -> list[Tensor]:
        return [buffer.clone() for buffer in self._own]

    def _hold(self, values: Sequence[Tensor], worker: int | None) -> None:
        for buffer, value in zip(self._own, values, strict=True):
            buffer.data.copy_(value)
        self._held_of = worker

    def average(self, weights: Sequence[float]) -> None:
        """Set the buffers to the mean of all workers' statistics; of counters, to the largest.

        Args:
            weights: of each worker's mini-batch.
        """
        self.look()
        if self._standing is None or not self._of or not (total := sum(weights)):
            return
        shares = [weight / total for weight in weights]
        each = [self._of.get(worker, self._standing) for worker in range(len(shares))]
        means = list[Tensor]()
        for values in zip(*each, strict=True):
            if has_mean(dtype := values[0].dtype):
                weighed = zip(shares, values, strict=True)
                mean = sum(value.to(carried(dtype)) * share for share, value in weighed if share)
                means.append(mean.to(dtype) if isinstance(mean, Tensor) else values[0])
            else:
                means.append(torch.stack(values).amax(0))
        self._hold(means, None)
        self._of.clear()
