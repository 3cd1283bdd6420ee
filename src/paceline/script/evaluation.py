"""Sums over what a loader gives: one worker as in plain PyTorch, several in parts.

    one worker    for batch in loader -> fn -> totals
    several       loader's positions, drawn once and alike -> ranges -> any free worker: batch, fn
    a split model                                          -> every n-th range each: all compute

Each range has its own random state, so the totals do not depend on which worker counted it, and
afterwards every generator is as it was before. A loader's own workers fetch its ranges, some of
them ahead. A bit above 300 lines, since what is fetched, counted and checked is one evaluation.
This module must not know how ranges are shared out.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from ..data.feed import FedWorkers, Indices, fetch
from ..data.loader import PREFETCH, refuse_shares
from ..data.order import EpochOrder
from ..data.own_iteration import refuse_own_iteration
from ..errors import ConfigError
from ..events import Lease
from ..exchange.base import End, Exchange
from ..exchange.evaluation import EvaluationRanges, LocalRanges, PartRanges, ranges_of
from ..replica.layers import Modes, has_own_modes
from ..replica.seeding import kept_random_state, mix, seed_all
from ..spread.group import tell_all
from ..wire.messages import Totals
from .loader import PreparedLoader
from .loop import to_device
from .prepared import Prepared
from .second_loader import SecondLoader

Counts = Callable[[Any], Mapping[str, tuple[Any, Any]]]
_RANGE_SALT = 6
_EXAMPLE = 'let it return {"loss": (loss.item() * len(targets), len(targets))}, or similar'


class Evaluation:
    """Evaluates in one worker.

    Args:
        prepared: the objects of ``prepare``; None: it was not called yet.
        seed: of the run.
        device: where this worker computes.
    """

    def __init__(
        self, exchange: Exchange, prepared: Prepared | None, seed: int, device: torch.device
    ) -> None:
        self._exchange = exchange
        self._prepared = prepared
        self._seed = seed
        self._device = device

    def totals(self, fn: Counts, loader: Any) -> Totals:
        """See ``Pace.evaluate``."""
        if isinstance(loader, PreparedLoader | SecondLoader):
            loader = loader.plain
        if not isinstance(loader, DataLoader):
            raise ConfigError(
                f"pace.evaluate(fn, loader) needs a DataLoader, got {type(loader).__name__}"
            )
        if self._prepared is not None:
            self._prepared.given.check_all()
        if self._exchange.num_workers == 1:
            return self._plainly(fn, loader)
        if self._prepared is None:
            raise ConfigError(
                "pace.evaluate() was called before pace.prepare(): several workers can share it "
                "only when they hold the same model; prepare first"
            )
        if isinstance(loader.dataset, IterableDataset):
            raise ConfigError(
                f"{type(loader.dataset).__name__} is an iterable data set, whose samples several "
                "workers cannot share out to evaluate them; make it map-style (__len__ and "
                "__getitem__), or use one worker"
            )
        refuse_shares(loader)
        refuse_own_iteration(loader)
        return self._in_parts(fn, loader)

    def _plainly(self, fn: Counts, loader: DataLoader[Any]) -> Totals:
        """The totals of the user's own loader from end to end; for the run it is one range."""
        ranges = LocalRanges([])
        num_batches = 0
        with self._evaluating():
            for batch in loader:
                self._exchange.beat()
                ranges.report(_checked(fn(to_device(batch, self._device))))
                num_batches += 1
        if not num_batches:
            raise _empty(loader)
        totals = ranges.totals()
        prepared = self._prepared
        if self._exchange.shared and prepared and not prepared.loop.is_iterating:
            census = self._exchange.census(1, 1)  # to report the totals to the run
            while census.next() is not None:
                census.report(totals)
            return census.totals()
        return self._reported(totals)

    def _in_parts(self, fn: Counts, loader: DataLoader[Any]) -> Totals:
        version = self._exchange.version
        order = EpochOrder(loader, self._seed)
        ends = order.draw_for_evaluation(version)
        batches = RangeBatches(loader, order, mix(self._seed, version, _RANGE_SALT))
        census = self._census(loader, order, ends, batches.num_ahead)
        with kept_random_state(), self._evaluating(), contextlib.closing(batches):
            while (bounds := census.next()) is not None:
                self._exchange.beat()
                batch = batches.load(bounds, census.ahead())
                census.report(_checked(fn(to_device(batch, self._device))))
        totals = census.totals()
        if isinstance(census, PartRanges):
            return self._of_all(totals, order)
        return self._reported(totals) if isinstance(census, LocalRanges) else totals

    def _of_all(self, totals: Totals, order: EpochOrder) -> Totals:
        """The totals of all workers, where a model is split; for the run it is one range."""
        shared = self._exchange.shared
        assert shared is not None
        assert shared.ranks is not None
        shared.come_to_end(End.EVALUATION)
        ranges = LocalRanges([])
        for counts in tell_all(shared.ranks.everyone, totals):
            ranges.report({name: (pair[0], pair[1]) for name, pair in counts.items()})
        census = shared.census(1, 1, None, order.fingerprint())
        while census.next() is not None:
            census.report(ranges.totals())
        return census.totals()

    def _reported(self, totals: Totals) -> Totals:
        """Report to the run what this worker has evaluated alone."""
        if self._exchange.shared is None or self._prepared is not None:
            self._exchange.measured(totals)
        return totals

    def _census(
        self, loader: DataLoader[Any], order: EpochOrder, ends: list[int] | None, num_ahead: int
    ) -> EvaluationRanges:
        """The ranges to count: all inside this worker's epoch; between epochs they are shared.

        Args:
            num_ahead: ranges that a worker can fetch ahead; it gets no more than its part.
        """
        num_samples, size = len(order.indices), loader.batch_size or 1
        if ends is None and loader.drop_last:
            num_samples -= num_samples % size
        if not num_samples:
            raise _empty(loader)
        assert self._prepared is not None
        shared = self._exchange.shared
        if self._prepared.loop.is_iterating or shared is None:
            return LocalRanges(ranges_of(num_samples, size, ends))
        ranges = ranges_of(num_samples, size, ends)
        if shared.hooks.spread is not None:
            return PartRanges(ranges[shared.seat :: shared.num_workers])
        ahead = min(num_ahead, -(-len(ranges) // shared.num_workers) - 1)
        return shared.census(num_samples, size, ends, order.fingerprint(), ahead)

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Without gradients, every module in evaluation mode; restores each mode afterwards."""
        if self._prepared is None:
            with torch.no_grad():
                yield
            return
        modes, weights = Modes(self._prepared.whole), self._merged_weights(self._prepared)
        self._prepared.whole.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            modes.put_back()
            for weight, before in weights:
                if not torch.equal(weight, before):
                    weight.data.copy_(before)

    def _merged_weights(self, prepared: Prepared) -> list[tuple[nn.Parameter, Tensor]]:
        """Weights that a layer may merge for evaluation, and their values.

        Unmerged they differ in their last digits, which no update has changed. Inside an epoch
        other workers may read them meanwhile, and of a split model not all are here: there they
        are checked as usual.
        """
        is_split = prepared.spread is not None
        if self._exchange.shared is None or is_split or prepared.loop.is_iterating:
            return []
        merging = [module for module in prepared.whole.modules() if has_own_modes(module)]
        held = {id(weight): weight for module in merging for weight in module.parameters()}
        return [(weight, weight.detach().clone()) for weight in held.values()]


class RangeBatches:
    """The batches of ranges, from the loader's own workers where it has any.

    This process then opens none of the data set's files, which workers forked later would
    share. Random numbers are those of the range, whichever process draws them.

    Args:
        order: the samples at the positions.
        seed: of this evaluation.

    Attributes:
        num_ahead: ranges that are fetched while one is evaluated.
    """

    def __init__(self, loader: DataLoader[Any], order: EpochOrder, seed: int) -> None:
        self._loader, self._order, self._seed = loader, order, seed
        is_batched = loader.batch_sampler is not None  # batch_size=None: each sample by itself
        num_workers = loader.num_workers if is_batched else 0
        prefetch = (loader.prefetch_factor or PREFETCH) if num_workers else 0
        self._workers = FedWorkers(loader, num_workers, prefetch)
        self.num_ahead = num_workers * prefetch
        self._asked: set[tuple[int, int]] = set()

    def load(self, bounds: tuple[int, int], ahead: Iterable[tuple[int, int]]) -> Any:
        """The batch of a range; this process continues from the range's random state.

        Args:
            ahead: the ranges that come next.
        """
        batch = self._fetched([bounds, *islice(ahead, self.num_ahead)]) if self._workers else None
        indices = self._indices(bounds)
        seed_all(indices.seed)
        if batch is not None:
            return batch
        collate: Callable[[Any], Any] = self._loader.collate_fn
        dataset: Any = self._loader.dataset
        if self._loader.batch_sampler is None:
            return collate(dataset[indices[0]])
        return collate(fetch(dataset, indices))

    def close(self) -> None:
        """End the loader's workers."""
        self._workers.close()

    def _fetched(self, ranges: list[tuple[int, int]]) -> Any:
        """The batch of the first range, from the workers, which fetch the others next."""
        new = [bounds for bounds in ranges if bounds not in self._asked]
        self._asked.update(new)
        self._workers.ask([(_lease(bounds), self._indices(bounds)) for bounds in new])
        return self._workers.take(_lease(ranges[0]))

    def _indices(self, bounds: tuple[int, int]) -> Indices:
        indices = Indices(self._order.indices[slice(*bounds)])
        indices.seed = mix(self._seed, bounds[0])
        return indices


def _lease(bounds: tuple[int, int]) -> Lease:
    return Lease(0, 0, *bounds)


def _empty(loader: DataLoader[Any]) -> ConfigError:
    reason = "fewer samples than one batch, drop_last=True" if loader.drop_last else "no samples"
    return ConfigError(f"the loader to evaluate on gives no batch ({reason})")


# -- what the user's function returns ------------------------------------------------------------


def _checked(returned: Any) -> Totals:
    """Per name the sum and the number of samples. ConfigError: ``fn`` returned something else."""
    if not isinstance(returned, Mapping):
        raise ConfigError(f"pace.evaluate: fn(batch) returned {_kind(returned)}; {_EXAMPLE}")
    totals = {}
    for name, pair in returned.items():
        if not isinstance(name, str):
            raise ConfigError(f"pace.evaluate: fn's names must be strings, got {name!r}")
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            hint = "" if isinstance(pair, tuple | list) else "it looks like a mean or one sum: "
            raise ConfigError(
                f"pace.evaluate: fn must return (sum over samples, number of samples) for "
                f"{name!r}: {_kind(pair)} was returned; {hint}{_EXAMPLE}"
            )
        count = _number(pair[1], f"number of samples of {name!r}")
        if not 0 <= count < math.inf:
            raise ConfigError(f"pace.evaluate: fn's number of samples of {name!r} is {count:g}")
        totals[name] = (_number(pair[0], f"sum of {name!r}"), count)
    return totals


def _number(value: Any, what: str) -> float:
    is_one = not isinstance(value, Tensor) or value.numel() == 1
    if is_one and not isinstance(value, str | bytes):
        with contextlib.suppress(TypeError, ValueError):
            return float(value)
    raise ConfigError(
        f"pace.evaluate: fn's {what} is {_kind(value)}; it must be one number: write value.sum() "
        "for the sum over the samples"
    )


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a Tensor of shape {tuple(value.shape)}"
    size = f" of {len(value)}" if isinstance(value, tuple | list) else ""
    return f"a {type(value).__name__}{size}"
