"""What a script holds: ``connect``, ``prepare``, the epochs, the step.

    pace = paceline.connect()
    model, optimizer, loader = pace.prepare(model, optimizer, loader)
    for epoch in pace.epochs(10):
        for inputs, targets in loader:
            with pace.step():
                optimizer.zero_grad()
                loss_fn(model(inputs), targets).backward()
                optimizer.step()

The script is the same for one worker and for many; only the exchange underneath differs. What
`Pace` offers beside its loop (evaluate, sum, save, ...) is in participant.py. This module must not
know sockets, how processes are created, or how a run is started.

Above 300 lines because it is the script's one entry point, and half of it is its users' reference.
"""

import contextlib
import multiprocessing
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ..context import Context
from ..data.numbers import OfRange, through
from ..errors import ConfigError
from ..exchange.base import End, Exchange, Stopped
from ..exchange.solo import SoloExchange
from ..exchange.through_store import StoreExchange
from ..fields import whole
from ..partition.names import divides
from ..passes import FAR, Passes, not_among
from ..replica.seeding import (
    GENERATORS,
    be_deterministic,
    kept_random_state,
    mix,
    seed_generators,
)
from ..tuning.allocator import kept_process
from ..tuning.candidate import Forward
from .grad_scaler import leave_scalers
from .loader import PreparedLoader, UpdateLoop
from .loop import TrainingLoop
from .participant import Participant
from .patches import Originals, unlisten
from .place import values_of
from .prepared import Prepared, PrepareOptions, refuse_apart
from .second_loader import SecondLoader
from .step import Step
from .trials import check_name, close_trial, error_like, open_trial
from .unprepared import unguard

BESIDE_SALT = 7
"""Separates the orders of further loaders from that of the first."""


class _Here(threading.local):
    """What this process, or this member of the inline engine, takes part in."""

    exchange: StoreExchange | None = None
    context = Context()
    pace: "Pace | None" = None


_here = _Here()
_STARTED_BY = "PACELINE_STARTED_BY"
"""Environment variable that tells a child process which worker started it."""
_STARTED_TOGETHER = (
    ("RANK", "WORLD_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)  # fmt: skip
"""Variables in which launchers number their processes and say how many there are; the first that
are complete count. A batch script of Slurm, which runs once, has SLURM_NTASKS, so that says
nothing; nor does the size of a step with a terminal, where only the first task has a shell."""
_TERMINAL = "SLURM_PTY_PORT"


def start_context(
    exchange: StoreExchange, context: Context, seeds: Sequence[str] = GENERATORS
) -> None:
    """Set what ``connect`` returns; called once in a member before the script runs.

    From here on all members draw the same random numbers, until the script seeds otherwise.

    Args:
        seeds: the generators that the script has not seeded itself.
    """
    if context.deterministic and context.is_own_process:
        be_deterministic()
    if context.is_own_process and exchange.num_workers > 1:
        os.environ[_STARTED_BY] = f"worker {exchange.seat}"
    seed_generators(context.seed, seeds)
    _here.exchange, _here.context, _here.pace = exchange, context, None


def is_started() -> bool:
    """Whether this process is a member, or has called ``connect``."""
    return _here.exchange is not None or _here.pace is not None


def current_pace() -> "Pace":
    """This process's part in the run that it is a member of; else it is the only worker.

    Ranks of another launcher join a run by ``launch.connecting.connect``, which scripts call.
    Each call returns the same object.

    Raises:
        ConfigError: the script was started by another launcher with several processes.
    """
    if _here.pace is None:
        if _here.exchange is None:
            _refuse_other_launchers()
        _here.pace = Pace(_here.exchange or SoloExchange(), _here.context)
    return _here.pace


def current() -> StoreExchange:
    """This member's exchange with its run, or with the trial that it is in."""
    assert _here.exchange is not None
    return _here.exchange


def finish() -> None:
    """End this member's updates; called once after the script has run."""
    if _here.pace is not None:
        _here.pace.finish()


def _refuse_other_launchers() -> None:
    if _STARTED_BY in os.environ:
        return  # WORLD_SIZE is that of the worker that started this process; prepare() refuses
    for rank_name, size_name in _STARTED_TOGETHER:
        size = os.environ.get(size_name, "")
        is_several = size.isdigit() and int(size) > 1
        if rank_name not in os.environ and not (is_several and size_name == "WORLD_SIZE"):
            continue
        if size_name.startswith("SLURM") and _TERMINAL in os.environ:
            return
        if is_several:
            missing = "MASTER_ADDR" if rank_name in os.environ else f"{rank_name} and MASTER_ADDR"
            raise ConfigError(
                f"another launcher started the script with {size_name}={size} but did not set "
                f"{missing}, the address where all processes meet; set it, or start the script "
                f"once with paceline launch --workers {size} SCRIPT (if each is to train alone, "
                "start each with --workers 1)"
            )
        if size:
            return


def _refuse_inside_a_worker(exchange: Exchange) -> None:
    """Refuse ``torch.multiprocessing.spawn(train, ...)`` in a worker: each would train it again."""
    starter = os.environ.get(_STARTED_BY)
    if (
        starter
        and isinstance(exchange, SoloExchange)
        and multiprocessing.parent_process() is not None
    ):
        raise ConfigError(
            f"prepare() was called in a process that {starter} started by multiprocessing, which "
            "would train once more for each worker; paceline launch starts the workers: call the "
            "training function directly, without spawn or a flag that asks for it"
        )


def _as_given(ready: list[Any]) -> Any:
    """A single object as it is, several as a tuple."""
    return ready[0] if len(ready) == 1 else tuple(ready)


def _checked(batch: str | None, fast: str) -> str:
    """Return ``fast``. ConfigError: ``batch`` or ``fast`` is not one of the known words."""
    if batch not in ("global", "per-worker", None):
        raise ConfigError(f"batch must be 'global' or 'per-worker', got {batch!r}")
    if fast not in ("auto", "none"):
        raise ConfigError(f"fast must be 'auto' or 'none', got {fast!r}")
    return fast


def _batch_of(objects: tuple[Any, ...], batch: str | None) -> str:
    """What a batch is. Each number of a range is one worker's.

    Raises:
        ConfigError: the numbers of a range were to be shared.
    """
    if not any(isinstance(getattr(item, "dataset", None), OfRange) for item in objects):
        return batch or "global"
    if batch == "global":
        raise ConfigError(
            "prepare(batch='global') with a range: each number is one worker's mini-batch and "
            "cannot be shared; leave batch out, or make a DataLoader over what the numbers index"
        )
    return "per-worker"


def _number_of(accumulate: object) -> int:
    if (number := whole(accumulate)) is None or number < 1:
        raise ConfigError(f"accumulate must be a number >= 1, got {accumulate!r:.60}")
    return number


def _beside_accumulation(num_batches: int, what: str) -> ConfigError:
    return ConfigError(
        f"accumulate {num_batches} with {what}: several workers share the samples of an update, "
        "not whole batches; accumulate by hand: if (i + 1) % n == 0 or i + 1 == len(loader)"
    )


class Pace(Participant):
    """A script's part in a run.

    Attributes:
        device: the device of this worker.
        worker, num_workers: this worker's number, and the number of workers.
        is_main: whether this worker prints and saves.
        seed: of the run. A member starts seeded with it; what the script seeds later replaces
            that. A script that ``python`` runs is not seeded.
    """

    def __init__(self, exchange: Exchange, context: Context) -> None:
        self._trials: list[str] = []
        """Names of the trials that the script has entered."""
        self._in_trial = ""
        super().__init__(exchange, context)

    def _begin(self, exchange: Exchange, context: Context) -> None:
        self._originals: list[Originals] = []
        super()._begin(exchange, context)

    @property
    def turn(self) -> int:
        """Which of the n updates of ``pace.updates(n)`` this turn contributes to.

        From 0 to n - 1, like the numbers of ``for turn in range(n)`` in one process: the number
        that was drawn, divided by how many an update averages. Where a turn steps several times
        (two optimizers, or one twice) and each step is a version, ``version`` runs ahead of it.

        Raises:
            ConfigError: the script has a loader, or no loop yet.
        """
        if self._prepared is None or self._prepared.source.numbers is None:
            raise ConfigError(
                "pace.turn is for a loop over pace.updates(n) without a loader; pace.version says "
                "how far training is"
            )
        return self._updates.turn

    def describe(
        self,
        *,
        task: str,
        source: str,
        notes: Sequence[str],
        epochs: int,
        own_batch_size: int | None = None,
    ) -> None:
        """Describe the task for the plan; before ``prepare``.

        Args:
            own_batch_size: samples that an update averages at the task's own learning rate.
        """
        self._context = replace(
            self._context,
            own_batch_size=own_batch_size,
            name=task,
            source=source,
            notes=tuple(notes),
            epochs=self._context.epochs or epochs,
        )

    # -- preparing ------------------------------------------------------------------------------

    def prepare(
        self,
        *objects: Any,
        batch: str | None = None,
        sticky: bool = False,
        fast: str | None = None,
        forward: Forward | None = None,
        accumulate: int = 1,
        closures: bool = False,
        together: bool = False,
        split: str | None = None,
    ) -> Any:
        """Make a model, its optimizer, its loader and its schedulers take part in the run.

        The objects stay the user's own, except for the loader; they are returned in the same order.

        A later call with a further ``DataLoader`` returns one for use inside the prepared loader's
        loop: with each mini-batch of the first loader it gives the matching share of its own
        batch, so that the workers together have what one process has. Each ``next()`` belongs to
        one mini-batch; open an iterator before the loop, and another one when it has ended::

            loader_b = pace.prepare(loader_b)
            for (x, y), (u, _) in zip(loader, loader_b): ...

        ``itertools.cycle`` keeps batches, which differ from worker to worker: it is refused. To
        look at a batch: ``next(iter(loader_b.plain))``. Its loader workers fetch as far ahead as
        those of the prepared loader.

        Args:
            objects: any number of ``nn.Module``, ``Optimizer`` and LR scheduler, and one
                ``DataLoader`` over a data set or a stream. A None, as of a scheduler that is not
                asked for, is returned in its place. Instead of a loader a ``range`` whose
                numbers the loop goes through in each epoch, to index its batches: each number is
                a mini-batch of one worker, as with batch="per-worker", and comes once an epoch.
                Without either: see ``updates``.
            batch: "global": the loader's batch size is what an update averages, shared by its
                mini-batches; "per-worker": it is one mini-batch (DDP's meaning). None: "global",
                and for a further loader the value of the first call.
            sticky: each worker keeps its part of every batch, in order: for a state that the script
                carries from batch to batch, as an RNN's. Under full-sync and local-sgd.
            fast: "auto": measure what makes a step faster here, and keep it; "none": try nothing;
                None: the value of ``--fast``.
            forward: (model, batch) -> loss, as the loop computes it, for the trials of "auto".
                Without it ``model(batch[0])`` is called with a made-up loss.
            accumulate: K >= 1 batches of the loader make an update, for a loop that steps on each
                batch; ``--accumulate`` takes precedence. The first K - 1 ``step()`` set their
                gradient aside, the K-th steps on the mean; so does the last of an epoch, on what
                there is. It equals a loop that adds up the gradients of ``loss * len(batch)``
                and, ``if (i + 1) % K == 0 or i + 1 == len(loader)``, divides by the number of
                samples and steps: a batch weighs by its samples (a short last one less than in
                Accelerate, where each weighs 1 / K), or by ``step.weight``. Clips of ``pace`` and
                prepared schedulers act on updates, ``len(loader)`` counts batches, ``version``
                and ``updates`` count updates. Leaving the loop early drops what is set aside.
            closures: whether an optimizer of your own may call the model again inside its step
                (SAM): under full-sync all workers then make each step together, each evaluation
                with the mean gradient and the mean loss of all. LBFGS needs no flag. An optimizer
                inside it that its ``state_dict()`` leaves out is kept by ``keep``.
            together: whether the loop relies on workers that step together, as one that sets a
                rate by hand for each step does: k-sync, async and similar protocols are then
                refused here, not where it first goes wrong.
            split: how the model is divided among the ranks of a run: "data" (each has all of it),
                "network:2" (two parts in sequence; "network": as many as workers), "2x2" (two
                parts in two copies), "layer" (channels of pairs of layers), "shard" or "shard:3"
                (pieces of everything; "shard:2" of gradients and optimizer state, "shard:1" of
                optimizer state alone). Each worker still has its own mini-batches, and holds and
                steps its part. None: the value of ``--split``.

        Raises:
            ConfigError: something is not supported; the message names it.
        """
        fast = _checked(batch, self._context.fast if fast is None else fast)
        num_batches = self._batches_of_update(accumulate, is_sticky=sticky)
        refuse_apart(self._context, is_asked=together)
        _refuse_inside_a_worker(self._exchange)
        objects = self._of_this_trial(objects, split)
        if self._prepared is not None:
            return self._prepare_beside(self._prepared, objects, batch)
        given, objects = objects, tuple(item for item in objects if item is not None)
        if self._in_trial:
            self._originals.append(Originals([x for x in objects if not isinstance(x, DataLoader)]))
        self._batch = _batch_of(objects, batch)
        options = PrepareOptions(
            batch=self._batch, fast=fast, forward=forward, is_sticky=sticky, closures=closures,
            split=split, accumulate=num_batches,
        )  # fmt: skip
        self._prepared = prepared = Prepared(
            self._exchange, self._context, objects, self.device, self._keeper, options
        )
        source = prepared.source
        self._loader = loader = PreparedLoader(
            prepared.loop, prepared.schedules, source.shape, source.num_batches, self._passes
        )
        self._attach(prepared, loader)
        self._count_updates(prepared, loader)
        return _as_given([loader if isinstance(item, DataLoader) else item for item in given])

    def _batches_of_update(self, accumulate: int, *, is_sticky: bool) -> int:
        """How many batches make an update. ConfigError: more than one, where that cannot be."""
        num_batches = self._context.accumulate or _number_of(accumulate)
        if num_batches > 1 and is_sticky:
            raise _beside_accumulation(num_batches, "prepare(sticky=True)")
        return num_batches

    def _of_this_trial(self, objects: tuple[Any, ...], split: str | None) -> tuple[Any, ...]:
        """The objects with a loader of an earlier trial as the plain loader that it was, and a
        range as a loader of its numbers.

        Raises:
            ConfigError: ``prepare`` is called outside of the script's trials, or splits a model
                in one.
        """
        if self._in_trial and divides(split or self._context.split):
            raise ConfigError(
                "pace.trial() does not support a split model, which it would have to return whole: "
                "train it in a run of its own, or use --split data"
            )
        if self._trials and not self._in_trial:
            raise ConfigError(
                f"prepare() is called outside of pace.trial(), after trial {self._trials[-1]!r}: a "
                "script trains in trials or without any; put this training into a trial, too"
            )
        loaders = PreparedLoader | SecondLoader
        plain = [
            item.plain if isinstance(item, loaders) and item.is_released else item
            for item in objects
        ]
        return tuple(through(item) if isinstance(item, range) else item for item in plain)

    def _attach(self, prepared: Prepared, loader: PreparedLoader) -> None:
        """Join the other workers, or print the notes on what was settled."""
        loader.asked_epochs = self._context.epochs
        if (exchange := self._exchange.shared) is not None:
            prepared.attach(exchange)
            if exchange.begins[0]:  # it joins a run that is in progress
                loader.passes = self._passes = Passes(*exchange.begins)
                self._passes.num_counted = 0  # it trains past the others' end, which reports it
            return
        for line in prepared.settled.notes:
            self.print(line)

    def _count_updates(self, prepared: Prepared, loader: PreparedLoader) -> None:
        """Make what `updates` goes over, and keep how far it and `publish` have come."""
        self._updates = UpdateLoop(
            loader, prepared.source.numbers, self._exchange, self._context,
            counts_blocks=prepared.steps_apart,
        )  # fmt: skip
        self._keeper.add("published", lambda: self._published_at, self._set_published_at)
        self._keeper.add("updates", self._updates.remember, self._go_on_with_updates)

    def _go_on_with_updates(self, state: list[int]) -> None:
        last, passes = self._updates.go_on(state), self._passes
        passes.num_counted = max(0, min(passes.num_counted, passes.first - 1 - last))

    def _prepare_beside(
        self, prepared: Prepared, objects: tuple[Any, ...], batch: str | None
    ) -> Any:
        """Further loaders, each with a batch for each batch of the first."""
        if (accumulation := prepared.loop.accumulation) is not None:
            raise _beside_accumulation(accumulation.num_batches, "a second prepared loader")
        for item in objects:
            if not isinstance(item, DataLoader):
                raise ConfigError(
                    f"prepare() was called twice, now with a {type(item).__name__}; prepare all "
                    "objects in one call, and only further DataLoaders in another: "
                    "loader_b = pace.prepare(loader_b)"
                )
        loop, batch = prepared.loop, batch or self._batch
        return _as_given([self._beside(loop, loader, batch) for loader in objects])

    def _beside(self, loop: TrainingLoop, loader: DataLoader[Any], batch: str) -> SecondLoader:
        context, keeper = self._context, self._keeper
        number = sum(isinstance(loader_beside, SecondLoader) for loader_beside in loop.beside) + 1
        second = SecondLoader(
            self._loader,
            loop,
            loader,
            size=(loader.batch_size or 1) * (context.parts if batch == "per-worker" else 1),
            seed=mix(self.seed, number, BESIDE_SALT),
            averages=context.averages and not context.is_difference,
        )
        if (exchange := self._exchange.shared) is not None:
            loop.beside.append(second)
            hooks, digest = exchange.hooks, exchange.hooks.order_digest
            hooks.order_digest = lambda: f"{digest()} {second.fingerprint()}"
            keeper.add(f"order {number}", *second.keep_order())
            keeper.add(f"loader {number}", second.remember, second.go_on)
        return second

    # -- several trainings in one script --------------------------------------------------------

    @contextlib.contextmanager
    def trial(self, name: str | None = None) -> Iterator[None]:
        """A block that trains on its own: several in a row in one script, as in a search.

        Each is a whole run of the same workers, with a plan, a folder and a summary of its own.
        ``prepare``, the loop, ``evaluate``, ``save``, ``keep_best``, ``stop_when`` and ``stop``
        belong to the trial around them; ``--epochs``, ``--updates``, ``--seconds`` and
        ``--target-accuracy`` hold for each. Afterwards the prepared objects are plain PyTorch
        again: a model with its trained weights, an optimizer with its state, a loader.

        A trial starts with the random state of the script at that point, and restores it at its
        end. So consecutive trials between which the script draws nothing all start alike, each
        gives what it would give alone, and what is seeded or drawn between them counts. Draw what
        is to differ from trial to trial before the block.

        An exception that leaves the block ends the trial in all workers, and the block raises one
        of its class in each, so all workers can catch it and go on alike. Ctrl-C and signals end
        the whole run: later trials do not train. A worker that dies is missing from the trials
        after it.

        Args:
            name: of the trial and of its folder in the run's; None: trial-1, trial-2, ...

        Raises:
            ConfigError: it is inside another trial, or the script also calls ``prepare`` outside
                of trials; the name was used before, or cannot name its folder; workers enter
                different trials.
            WorkerError: another worker failed in it, with an exception class not known here.

        Example::

            for lr in (0.3, 0.1, 0.03):
                with pace.trial(f"lr-{lr}"):
                    model = make()
                    optimizer = SGD(model.parameters(), lr=lr)
                    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(...))
                    for epoch in pace.epochs(3):
                        ...
                    results[lr] = pace.evaluate(count, test)
        """
        name = self._enter_trial(name)
        outside, before = vars(self).copy(), _here.exchange
        if self.device.type == "cuda":  # its random state is kept, too
            torch.cuda.init()
        with kept_random_state(), kept_process():
            exchange, context = open_trial(self._exchange, self._context, name)
            _here.exchange = exchange.shared or before
            self._begin(exchange, context)
            self._in_trial = name
            error: BaseException | None = None
            try:
                yield
                self._leave_trial()
            except BaseException as one:  # however a trial ends, the others must be told
                if exchange.shared is not None and not isinstance(one, Exception | Stopped):
                    raise  # the script ends
                error = one
            over = close_trial(exchange, self._prepared, error)
            self._take_back()
            vars(self).clear()
            vars(self).update(outside)
        _here.exchange, self._exchange.is_cut_short = before, exchange.is_cut_short
        if (member := self._exchange.shared) is not None:
            member.come_back(is_main=over.is_main)
        is_own = isinstance(error, Exception) and not exchange.is_cut_short
        if over.text and not is_own:
            raise error_like(over, name) from None
        if error is not None:
            raise error

    def _enter_trial(self, name: str | None) -> str:
        """The trial's name. ConfigError: the name or this place is not allowed."""
        if self._in_trial:
            raise ConfigError(
                f"pace.trial() is inside trial {self._in_trial!r}; end one before the next"
            )
        if self._prepared is not None:
            raise ConfigError(
                "pace.trial() comes after a prepare() outside of any trial: a script trains in "
                "trials or without any; put that prepare() and its loop into a trial of its own"
            )
        chosen = f"trial-{len(self._trials) + 1}" if name is None else name
        self._trials.append(check_name(chosen, self._trials))
        return chosen

    def _leave_trial(self) -> None:
        """End what the block has begun."""
        self.finish()
        if self._prepared is not None:
            self._prepared.loop.end_iteration()

    def _take_back(self) -> None:
        """Make what was prepared the script's own again."""
        if self._prepared is not None:
            self._prepared.release()
        for originals in self._originals:
            originals.put_back()
        unlisten()
        unguard()
        leave_scalers()

    # -- the loop -------------------------------------------------------------------------------

    def epochs(self, epochs: int | Sequence[int]) -> Iterator[int]:
        """The numbers of the epochs; ends early when the run is stopped.

        A resumed run starts with the epoch that was cut off, and the loader gives its rest.

        Args:
            epochs: how many, numbered from 0; or the values themselves, as ``range(1, n + 1)`` or
                a list. ``--epochs`` of the command line replaces their number.

        Raises:
            ConfigError: it is neither, a list has fewer values than ``--epochs`` asks for, or the
                run resumes at a value that is not in it.
        """
        values = values_of(epochs, self._context.epochs)
        if self._prepared is not None and self._prepared.source.numbers is not None:
            raise ConfigError(
                "pace.epochs() needs a loader, and prepare() got none: "
                "for number in pace.updates(2000), or give prepare() the loader"
            )
        return self._each_epoch(values)

    def updates(
        self, updates: int | None = None, loader: PreparedLoader | None = None
    ) -> Iterator[Any]:
        """The loop of a script that counts updates: it ends at this version in all workers.

        With several optimizers it counts blocks, also where each of their steps is a version.

        Over a loader it gives its mini-batches, pass after pass, the last one cut short. Without
        one it numbers the draws that the script makes itself: each number stands for one
        mini-batch, seeds all random state and counts once, so whichever worker repeats a draw
        gets the same one. Update v averages the numbers v K to v K + K - 1 (K: the protocol's;
        one for one worker). Called again with a higher version, it goes on from there; versions
        count from the start of the run, so ``pace.updates(pace.version + n)`` makes n more.

        Args:
            updates: the version to end with; None: it goes on until a worker leaves the loop (by
                ``break``), or ``pace.stop()``, ``pace.stop_when`` or ``--updates`` ends the run.
            loader: as ``prepare`` returned it; None: ``prepare`` got none.

        Returns:
            Mini-batches, or the numbers that this worker is granted. Before each number
            ``paceline.step_seed(pace.seed, 0, number)`` seeds Python, NumPy and torch.

        Raises:
            ConfigError: ``prepare`` was not called, or ``loader`` is given without one in
                ``prepare`` or the other way round; ``updates`` is not a number; a whole pass
                makes no update.

        Example::

            model, optimizer = pace.prepare(model, optimizer)
            for number in pace.updates(2000):
                with pace.step():
                    inputs, targets = get_batch()
                    ...
        """
        count = FAR if updates is None else whole(updates)
        if count is None or count < 0:
            raise ConfigError(f"pace.updates() takes a number of updates, got {updates!r:.60}")
        if (prepared := self._prepared) is None:
            raise ConfigError("pace.updates() comes after pace.prepare(model, optimizer)")
        if self._context.epochs is not None:
            raise ConfigError(
                f"--epochs {self._context.epochs}: this script counts updates, not epochs "
                "(pace.updates); to end it sooner use --updates"
            )
        if prepared.source.numbers is None and not isinstance(loader, PreparedLoader):
            raise ConfigError(
                "prepare() was given a loader, and pace.updates() was not given the one that it "
                f"returned: for batch in pace.updates({updates}, loader)"
            )
        if prepared.source.numbers is not None and loader is not None:
            raise ConfigError(
                "pace.updates() was given a loader, and prepare() was not: "
                "model, optimizer, loader = pace.prepare(model, optimizer, loader)"
            )
        if prepared.source.is_stream and prepared.steps_apart:
            raise ConfigError(
                "pace.updates() cannot tell how many mini-batches of a stream several optimizers "
                "step on, where each step is an update of all workers (full-sync): loop by epochs, "
                "or use another protocol"
            )
        if self._updates.has_begun and self._exchange.version >= count:
            self.print(
                f"note: pace.updates({count}) makes no update: the run is at version "
                f"{self._exchange.version}; pace.updates(pace.version + n) makes n more"
            )
        return self._updates.each(count)

    def finish(self) -> None:
        """The script is over: the end of its loop is saved once all workers are here."""
        if self._prepared is not None:
            self._prepared.loop.check_leaving()
        if self._passes.has_missed and not self._exchange.is_stopped:
            raise not_among(self._passes.place.value, None)
        if self._prepared is not None and self._updates.has_begun:
            self._prepared.loop.end_iteration()
            self._say_what_did_nothing()
            self._exchange.rest(self._passes.next)
        if (member := self._exchange.shared) is not None:
            member.settle_stop()
            if self._has_left_epochs(member):
                self._say_what_did_nothing()
                self._passes.end()
                member.rest(self._passes.next, is_over=True)
            member.come_to_end(End.OVER)

    def _has_left_epochs(self, member: StoreExchange) -> bool:
        """Whether it trained, and no loop over epochs has come to its last: left by a break, or
        counted by the script itself."""
        has_trained = self._prepared is not None and self._passes.num_trained > 0
        is_between = member.grant() is None and not (member.is_over or member.is_stopped)
        return has_trained and is_between

    def _each_epoch(self, values: Sequence[int]) -> Iterator[int]:
        passes = self._passes
        first = passes.enter(values)
        if first is None:
            return
        if (member := self._exchange.shared) is not None:
            member.is_over = False
        for index in range(first, len(values)):
            if not self._exchange.goes_on():
                self._exchange.leave_epochs()
                self._say_what_did_nothing()
                return
            passes.arrive(passes.begin + index, values[index])
            try:
                yield values[index]
            except GeneratorExit:  # a break
                self._exchange.leave_epochs()
                raise
            self._exchange.is_cut_short = False
            self._finish_leaving()
        if self._prepared is not None:
            self._prepared.loop.end_iteration()
        passes.arrive(passes.begin + len(values))
        self._say_what_did_nothing()
        self._exchange.rest(passes.next)

    def step(self) -> Step:
        """One step on one mini-batch; left early when its work is superseded.

        Logging belongs inside the block, or after ``if step.was_superseded: continue``.
        """
        prepared = self._after_prepare("step")
        prepared.step.begin()
        return Step(prepared.loop, prepared.explain)

    def backward(self, loss: Tensor) -> None:
        """``loss.backward()``, outside autocast; in fp16 it scales the loss. It is recorded."""
        self._after_prepare("backward").gradients.backward(loss)

    def autocast(self, dtype: torch.dtype | None = None) -> torch.autocast:
        """Mixed precision for a forward pass: ``dtype``, else ``--precision``, else bfloat16.

        With float16 call ``pace.backward(loss)``: it scales the loss, ``clip_grad_norm_`` and
        ``optimizer.step()`` unscale the gradients, and all workers skip an update that overflowed,
        which then counts for no scheduler.
        """
        return self._after_prepare("autocast").gradients.amp.autocast(dtype)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the *averaged* gradient of the update to ``max_norm``, after the last backward.

        With one plain worker, and under local-sgd where each steps by itself, it is torch's own.

        Args:
            parameters: all of the model's that have gradients.
            max_norm: >= 0, the same in every worker.
            norm_type: 2, except where it is torch's own.

        Returns:
            The norm before clipping: at once where it is torch's own, else once
            ``optimizer.step()`` is done, of the update that used this step's gradient; nan where
            no update has used it by then, as under protocols that go on before an update is full.

        Raises:
            ConfigError: it is given a part of the gradients, workers disagree, or a norm is read
                before it is there.
        """
        return self._after_prepare("clip_grad_norm_").gradients.clip_norm(
            parameters, max_norm, norm_type
        )

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip each element of the *averaged* gradient to [-clip_value, clip_value].

        With ``clip_grad_norm_`` in the same step it acts after it. Else as ``clip_grad_norm_``.
        """
        self._after_prepare("clip_grad_value_").gradients.clip_value(parameters, clip_value)

    @contextlib.contextmanager
    def edit_gradients(self) -> Iterator[None]:
        """Inside, changes to ``.grad`` act on this worker's own part, before it is averaged.

        Between ``backward()`` and ``optimizer.step()``; outside this block such a change is
        refused where an update averages several workers' parts. A linear change (a factor, a mask,
        centralising) has the same result as on the average; another (clamping, a norm, noise) does
        not.

        Example::

            with pace.edit_gradients():
                for parameter in model.parameters():
                    parameter.grad -= parameter.grad.mean()
        """
        edits = self._after_prepare("edit_gradients").gradients.edits
        with contextlib.nullcontext() if edits is None else edits.allowed():
            yield
