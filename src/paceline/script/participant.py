"""A script's part in a run, without the training: what it reads, reports, sums, keeps and saves.

    pace.worker, num_workers, version, is_main, ...     where it is
    pace.print, log                                     what it reports
    pace.evaluate, keep_best, stop_when                 metrics
    pace.sum, once, publish                             what all workers do together
    pace.save, keep, stop                               files, checkpoints, the end

`Pace` in worker.py adds what trains: ``prepare``, the loops, the step and trials. This module must
not know sockets, nor how a script loops or steps.

Above 300 lines because half of it is its users' reference.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ..checkpoints.best import BestModels
from ..checkpoints.state import model_file
from ..context import Context
from ..errors import ConfigError
from ..exchange.base import Exchange
from ..exchange.through_store import StoreExchange
from ..fields import integer, whole
from ..passes import Passes
from ..stopping import rule_of
from ..system.processors import find_device
from ..wire.messages import Totals
from .evaluation import Evaluation
from .loader import PreparedLoader
from .member_state import MemberState
from .prepared import Prepared
from .second_loader import SecondLoader

Value = Tensor | float | int
_LOW, _SIGN = (1 << 32) - 1, 1 << 63
"""The lower half of an integer of 64 bits, and the weight of its sign."""


def _numbers_of(value: Tensor) -> list[float]:
    """The numbers to sum over workers. ConfigError: the tensor is complex."""
    if value.is_complex():
        raise ConfigError(
            "pace.sum() sums real numbers, got a complex tensor: pass torch.view_as_real(value), "
            "and convert the sum with torch.view_as_complex"
        )
    numbers: list[float] = value.detach().flatten().tolist()
    return numbers


def _sum_of_integers(value: Tensor, add: Callable[[Sequence[float]], Sequence[float]]) -> Tensor:
    """Sum in two halves, of which a float64 holds the sum over two million workers exactly."""
    numbers = [int(number) for number in value.detach().flatten().tolist()]
    halves = [*(number >> 32 for number in numbers), *(number & _LOW for number in numbers)]
    sums = [int(total) for total in add([float(half) for half in halves])]
    pairs = zip(sums[: len(numbers)], sums[len(numbers) :], strict=True)
    totals = [(high << 32) + low for high, low in pairs]
    wrapped = [(total + _SIGN) % (2 * _SIGN) - _SIGN for total in totals]  # as torch.sum does
    return torch.tensor(wrapped, dtype=torch.int64).reshape(value.shape).to(value.device)


def _as_tensor_like(value: Tensor, sums: Sequence[float]) -> Tensor:
    kind = torch.promote_types(value.dtype, torch.float32)
    total = torch.tensor(sums, dtype=torch.float64).reshape(value.shape)
    return total.to(kind).to(value.device)  # in this order: not all devices have float64


class Participant:
    """What a script knows of a run and does in it beside its steps; the base of `Pace`."""

    def __init__(self, exchange: Exchange, context: Context) -> None:
        self._begin(exchange, context)

    def _begin(self, exchange: Exchange, context: Context) -> None:
        """Set the state that a run, or a trial, starts with."""
        self._exchange = exchange
        self._context = context
        self._prepared: Prepared | None = None
        self._passes = Passes(context.first_epoch, context.place)
        exchange.place = lambda: self._passes.place
        self._keeper = MemberState(
            Path(context.run_dir) if context.run_dir else None,
            Path(context.resume) if context.resume else None,
            exchange.seat,
            context.run_identity,
            context.first_epoch,
        )
        self._published_at: list[int] = []
        self._best: BestModels | None = None
        if context.keep_best:
            self._best = self._best_models()
        self.worker = exchange.seat
        self.num_workers = exchange.num_workers
        self.seed = context.seed
        local = exchange.seat if context.local_rank is None else context.local_rank
        self.device = find_device(context.device, local)

    @property
    def is_main(self) -> bool:
        return self._exchange.is_main

    @property
    def version(self) -> int:
        """Number of updates in the parameters that the model holds."""
        self._exchange.has_told_version = self._exchange.has_told_place = True
        return self._exchange.version

    @property
    def context(self) -> Context:
        """What this worker was told about the run at its start."""
        return self._context

    @property
    def is_stopped(self) -> bool:
        """Whether the run was asked to end, or is over."""
        self._exchange.has_told_place = True
        return self._exchange.is_stopped

    @property
    def is_cut_short(self) -> bool:
        """Whether the end of the run left the loader's last pass empty."""
        return self._exchange.is_cut_short

    def print(self, *values: object, **options: Any) -> None:
        """Print in the main worker only."""
        if self.is_main:
            print(*values, **options)  # noqa: T201  it is what the user asked for

    def log(self, values: Mapping[str, Value]) -> None:
        """Record numbers in the run's log; a script alone under plain ``python`` has none.

        Those of the main worker count; in a loop over numbers (``updates`` without a loader),
        where each number belongs to one worker, those of the worker that records them.

        Raises:
            ConfigError: a name is not a string.
        """
        if bad := [name for name in values if not isinstance(name, str)]:
            raise ConfigError(f"pace.log takes numbers by name, got the name {bad[0]!r}")
        if self.is_main or self._draws_alone:
            self._exchange.log({name: float(value) for name, value in values.items()})

    @property
    def _draws_alone(self) -> bool:
        """Whether the script is at a number of its loop, which only this worker gets."""
        prepared = self._prepared
        return (
            prepared is not None
            and prepared.source.numbers is not None
            and prepared.loop.is_iterating
        )

    # -- metrics --------------------------------------------------------------------------------

    def evaluate(
        self,
        fn: Callable[[Any], Mapping[str, tuple[Value, Value]]],
        loader: DataLoader[Any] | PreparedLoader | SecondLoader,
    ) -> Totals:
        """Sums over what ``loader`` gives, at one version, the same totals in all workers.

        Its sampler, batch sampler and ``drop_last`` count. Between epochs all workers share the
        work, each batch once; inside one, the caller does it alone at the version that it holds.
        With several workers the order is drawn once and alike, and each batch is made under its
        own random state, which depends only on seed, version and position, by the loader's
        ``num_workers`` if it has any; one worker iterates the loader as plain PyTorch does. With
        several workers, these draws do not change what the script draws afterwards.

        Args:
            fn: batch -> {name: (sum over samples, number of samples)}; run without gradients and
                with the model in evaluation mode. Afterwards each module is put back into its own
                mode, by its own ``train()``.
            loader: a DataLoader; a prepared one counts as the plain one that it was. One over an
                iterable data set works with one worker only.

        Returns:
            name -> (sum, number of samples).

        Raises:
            ConfigError: ``fn`` returns something else; the loader gives nothing, or other samples
                in each worker; several workers were not prepared yet.
        """
        self._finish_leaving()
        prepared = self._prepared
        is_inside = prepared is not None and prepared.loop.is_iterating
        evaluation = Evaluation(self._exchange, prepared, self.seed, self.device)
        totals = evaluation.totals(fn, loader)
        if self._best is not None and prepared is not None and (is_inside or self.is_main):
            self._best.look(totals, self.version, lambda: model_file(prepared.whole))
        return totals

    def keep_best(self, name: str, most: int = 1, mode: str | None = None) -> None:
        """Keep the models of the best evaluations, as ``--keep-best`` keeps one.

        Every ``pace.evaluate`` that measures ``name`` counts, between epochs and inside one. The
        best model is saved in the run's folder (under plain ``python`` in the current one) as
        ``best.safetensors``; with ``most`` > 1 each one
        that is kept also as ``best-VERSION.safetensors``. ``best.json`` lists them, the best
        first. They load like what ``save`` writes.

        Args:
            name: of the metric.
            most: models to keep, >= 1.
            mode: "max" or "min": which of two is better; None: by the words of its name: less of a
                loss, an error or a perplexity is better, and more of an accuracy.

        Raises:
            ConfigError: it was called before, a value is out of range, or the name does not tell
                which way is better and ``mode`` is not given.
        """
        if self._best is not None and self._best.name is not None:
            raise ConfigError(
                "pace.keep_best() was called twice; only one metric can say which is best"
            )
        if (number := whole(most)) is None or number < 1:
            raise ConfigError(f"pace.keep_best({name!r}): most must be >= 1, got {most!r:.60}")
        self._best = self._best_models(name, number, mode)

    def _best_models(
        self, name: str | None = None, most: int = 1, mode: str | None = None
    ) -> BestModels:
        context = self._context
        return BestModels(Path(context.run_dir or "."), context.run_identity, name, most, mode)

    def stop_when(
        self,
        name: str,
        *,
        above: float | None = None,
        below: float | None = None,
        patience: int | None = None,
        min_delta: float = 0.0,
        mode: str | None = None,
    ) -> None:
        """End the whole run by a metric: when it is good enough, or stops improving.

        Every ``pace.evaluate`` that measures ``name`` counts, also one that a worker makes alone
        inside its loop (of several at one version the first; under local-sgd it measures that
        worker's own weights); a resumed run counts the earlier ones, too. If it is called again,
        each rule holds. The run ends as by ``stop``.

        Args:
            name: of the metric.
            above, below: end where it is at least, or at most, this value.
            patience: end after this many evaluations in a row without an improvement, >= 1.
            min_delta: a change of at most this much is no improvement, >= 0.
            mode: as for ``keep_best``; bounds alone need none.

        Raises:
            ConfigError: no rule is given, a value is out of range, or patience is given and the
                name does not tell which way is better.

        Example::

            pace.stop_when("acc", above=0.9)
            pace.stop_when("val_loss", patience=3)
        """
        self._exchange.stop_when(
            rule_of(
                name, above=above, below=below, patience=patience, min_delta=min_delta, mode=mode
            )
        )

    def _say_what_did_nothing(self) -> None:
        """Print which metrics were asked for but never measured."""
        alone, best = self._exchange.alone, self._best
        names = [] if alone is None else alone.rules.unmeasured()
        calls = [f"pace.stop_when({name!r})" for name in names]
        if best is not None and best.name is not None and not best.has_measured:
            calls.append(f"pace.keep_best({best.name!r})")
        for call in calls:
            self.print(f"note: {call} did nothing: no pace.evaluate measured that metric")

    # -- what all workers do together -----------------------------------------------------------

    @overload
    def sum(self, value: float) -> float: ...

    @overload
    def sum(self, value: Tensor) -> Tensor: ...

    def sum(self, value: Value) -> Tensor | float:
        """The sum of ``value`` over all workers; all must call it between epochs.

        Inside the loop (full-sync, local-sgd) all must call it equally often. Where a worker does
        the mini-batches of one that has died, and so cannot, the run ends rather than waits.

        Args:
            value: a number, or a tensor of the same shape in every worker, which is summed
                element by element, in one round of all workers. It takes no part in a gradient.

        Returns:
            A number for a number; for a tensor one of its shape and on its device. Floating-point
            tensors keep their type, except that 16-bit ones become ``float32``; integers and
            booleans become ``int64``, as by ``torch.sum``.

        Raises:
            ConfigError: a tensor is complex, or has another shape in another worker; the call is
                inside the loader's loop where workers go at their own pace, or at a batch of fewer
                samples than there are workers, or before it, or before ``prepare``.
        """
        self._finish_leaving()
        prepared = self._prepared
        is_inside = prepared is not None and prepared.loop.is_iterating
        if is_inside and self.num_workers > 1 and not self._context.is_spmd:
            raise ConfigError(
                f"pace.sum() is inside the loader's loop, where under {self._context.protocol} "
                "each worker has its own mini-batches and not all call it; put it between epochs"
            )
        few = prepared.few_samples if prepared is not None and is_inside else None
        if few is not None:
            raise ConfigError(
                f"pace.sum() is inside the loader's loop, where this batch or the next has only "
                f"{few} samples for {self.num_workers} workers, so not all call it; put it "
                "between epochs, or give the loader drop_last=True"
            )
        if self.num_workers > 1 and prepared is None:
            raise ConfigError(
                "pace.sum() was called before pace.prepare(), where several workers first meet"
            )
        if isinstance(value, Tensor):
            if not (value.is_floating_point() or value.is_complex()):
                return _sum_of_integers(value, self._exchange.sum)
            return _as_tensor_like(value, self._exchange.sum(_numbers_of(value)))
        return self._exchange.sum([float(value)])[0]

    @contextlib.contextmanager
    def once(self) -> Iterator[bool]:
        """A block that the main worker runs first, and all others after it.

        For what must not happen in several workers at the same time: a download, preprocessing
        into a cache, making a folder. It may be anywhere between ``connect`` and the end except
        inside the loader's loop; all workers must reach it. If the main worker dies inside,
        another one becomes the main worker and goes first. With one worker it costs nothing.

        Returns:
            (as ``with ... as is_first``) whether this worker goes first.

        Raises:
            ConfigError: it is inside the loader's loop.

        Example::

            with pace.once():
                data = MNIST("data", download=True)
        """
        if self._prepared is not None and self._prepared.loop.is_iterating:
            raise ConfigError(
                "pace.once() is inside the loader's loop, where each worker has its own batches "
                "and not all reach it; put it before the loop or between epochs, or write "
                "if pace.is_main:"
            )
        with self._exchange.once() as is_first:
            yield is_first

    def publish(self, model: torch.nn.Module) -> None:
        """Declare weights that the script has changed itself to be the run's from now on.

        Without this call such a change is refused. Between epochs (a reinitialised layer, pruning,
        a loaded checkpoint) all workers get the main worker's weights when the next epoch begins;
        an evaluation before that is refused unless all workers have made the same change. Inside
        the loop, directly after the change, it is supported with one worker and with local-sgd:
        there the change is part of what the worker has learned by itself. The optimizer's state
        for each weight stays as it is; before the first epoch, and under ``python train.py``, the
        call does nothing.

        Args:
            model: one that was prepared, or a part of it.

        Raises:
            ConfigError: it was not prepared; the call is inside the loop where an update averages
                several workers' gradients; another worker published, and the main worker did not.

        Example::

            for epoch in pace.epochs(20):
                if epoch == 10:
                    model.head.reset_parameters()
                    pace.publish(model)
                for inputs, targets in loader:
                    ...
        """
        prepared = self._prepared
        modules = (
            ()
            if prepared is None
            else (part for each in prepared.models for part in each.modules())
        )
        if prepared is None or all(part is not model for part in modules):
            raise ConfigError(
                f"pace.publish() was given a {type(model).__name__} that prepare() was not: "
                "model, optimizer, loader = pace.prepare(model, optimizer, loader)"
            )
        if (member := self._exchange.shared) is not None:
            self._publish(member)

    def _publish(self, member: StoreExchange) -> None:
        if self._passes.is_before:
            return  # the training since then includes the change
        place = [self._passes.place.position, self._passes.next]
        is_new = member.has_opened or place != self._published_at
        self._published_at = place
        if is_new:  # else a checkpoint has it, and the script repeats the call
            member.publish(self._context.protocol)

    def _set_published_at(self, place: list[int]) -> None:
        self._published_at = [integer(number) for number in place]

    # -- files and checkpoints ------------------------------------------------------------------

    def save(
        self, name: str = "model.safetensors", *, model: torch.nn.Module | None = None
    ) -> Path:
        """Save the model's parameters and buffers into the run's folder, or the current one if the
        script is alone under plain ``python``.

        The main worker saves; in a loop over numbers (``updates`` without a loader), where each
        number belongs to one worker, the worker that calls it: ``if number % 100 == 0:
        pace.save()``. The file loads without Paceline:
        ``load_state_dict(safetensors.torch.load_file(path))``.

        Args:
            model: one of several; None: all, as ``nn.ModuleList`` names them (``0.weight``).

        Raises:
            ConfigError: it was not prepared.
        """
        from ..checkpoints.state import save_model, save_tensors

        prepared = self._after_prepare("save")
        if model is not None and not any(model is known for known in prepared.models):
            raise ConfigError(
                f"pace.save(model=...) was given a {type(model).__name__} that prepare() was not"
            )

        path = Path(self._context.run_dir or ".") / name
        if self.is_main or self._draws_alone:
            is_within = Path(name).name == name  # else it is a path of the user's own
            identity = self._context.run_identity if is_within else None
            if (spread := prepared.spread) is not None:
                save_tensors(spread.shapes(), spread.read, path, identity)
            else:
                save_model(prepared.whole if model is None else model, path, identity)
        return path

    def keep(self, **things: Any) -> None:
        """Keep these in checkpoints, and restore them now if the run is resumed.

        For state that the loop holds besides model, optimizer, schedulers and scaler: an averaged
        model, a best accuracy, a sampler with a state, a ``torch.Generator``. The main worker's
        are kept.

        Args:
            things: objects with ``state_dict()`` and ``load_state_dict()``, or generators with
                ``get_state()`` and ``set_state()``; numbers, strings, tensors, lists and dicts in
                them are kept, without pickle.

        Raises:
            ConfigError: an object has neither pair, or a name is given twice.

        Example::

            pace.keep(ema=ema_model, best=best)
        """
        self._exchange.has_told_place = True
        for name, thing in things.items():
            self._keeper.keep(name, thing)
        self._exchange.note_kept()

    def stop(self) -> None:
        """End the whole run at the next step border."""
        self._exchange.ask_to_stop()

    def _finish_leaving(self) -> None:
        """Leave the epoch where an exception left the loop: the others still count on us."""
        if self._prepared is not None:
            self._prepared.loop.finish_leaving()

    def _after_prepare(self, name: str) -> Prepared:
        """What was prepared. ConfigError: nothing yet."""
        if self._prepared is None:
            raise ConfigError(f"pace.{name}() comes after pace.prepare(model, optimizer, loader)")
        return self._prepared
