"""What a script holds: ``connect``, ``prepare``, the epochs, the step.

    pace = paceline.connect()
    model, optimizer, loader = pace.prepare(model, optimizer, loader)
    for epoch in pace.epochs(10):
        for inputs, targets in loader:
            with pace.step():
                optimizer.zero_grad()
                loss_fn(model(inputs), targets).backward()
                optimizer.step()

The script is the same for one worker and for many; what differs is the exchange underneath. This
module must not know sockets, how processes come to be, or how a run is started.

Above 300 lines because it is the script's one door, and half of it is what its users read.
"""

import contextlib
import json
import multiprocessing
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ..checkpoints.best import BestModels
from ..checkpoints.state import model_file
from ..context import Context
from ..data.numbers import OfRange, through
from ..errors import ConfigError, PacelineError, WorkerError
from ..exchange.base import End, Exchange, Stopped
from ..exchange.solo import SoloExchange
from ..exchange.through_store import StoreExchange
from ..fields import integer, whole
from ..partition.names import divides
from ..passes import FAR, Passes, not_among
from ..replica.seeding import (
    GENERATORS,
    be_deterministic,
    kept_random_state,
    mix,
    seed_generators,
)
from ..stopping import rule_of
from ..system.processors import find_device
from ..tuning.allocator import kept_process
from ..tuning.candidate import Forward
from ..wire.messages import Totals, TrialOver
from .evaluation import Evaluation
from .grad_scaler import leave_scalers
from .loader import PreparedLoader, UpdateLoop
from .loop import TrainingLoop
from .member_state import MemberState
from .patches import Originals, unlisten
from .place import values_of
from .prepared import Prepared, PrepareOptions, refuse_apart
from .second_loader import SecondLoader
from .step import Step
from .unprepared import unguard

Value = Tensor | float | int

BESIDE_SALT = 7
"""Of the orders of further loaders."""


class _Here(threading.local):
    """What this process, or this member of the inline engine, takes part in."""

    exchange: StoreExchange | None = None
    context = Context()
    pace: "Pace | None" = None


_here = _Here()
_STARTED_BY = "PACELINE_STARTED_BY"
"""Tells a process that a worker starts whose it is."""


def start_context(
    exchange: StoreExchange, context: Context, seeds: Sequence[str] = GENERATORS
) -> None:
    """Called once in a member before the script runs: what ``connect`` will find.

    From here on all members draw the same random numbers, until the script seeds otherwise.

    Args:
        seeds: the generators that the script has not seeded by itself already.
    """
    if context.deterministic and context.is_own_process:
        be_deterministic()
    if context.is_own_process and exchange.num_workers > 1:
        os.environ[_STARTED_BY] = f"worker {exchange.seat}"
    seed_generators(context.seed, seeds)
    _here.exchange, _here.context, _here.pace = exchange, context, None


def _numbers_of(value: Tensor) -> list[float]:
    """What is to be summed over workers. ConfigError: it is complex."""
    if value.is_complex():
        raise ConfigError(
            "pace.sum() was given a complex tensor, and sums real numbers: give it "
            "torch.view_as_real(value), and take the sum by torch.view_as_complex"
        )
    numbers: list[float] = value.detach().flatten().tolist()
    return numbers


def _as_tensor_like(value: Tensor, sums: Sequence[float]) -> Tensor:
    kind = (
        torch.promote_types(value.dtype, torch.float32)
        if value.is_floating_point()
        else torch.int64
    )
    total = torch.tensor(sums, dtype=torch.float64).reshape(value.shape)
    return total.to(kind).to(value.device)  # in this order: not all devices have float64


def is_started() -> bool:
    """Whether this process is a member, or has called ``connect``."""
    return _here.exchange is not None or _here.pace is not None


def current_pace() -> "Pace":
    """This process's part in the run that it is a member of already; else it is the only worker.

    Ranks of another launcher take part in a run by ``launch.connecting.connect``, which scripts
    call. Calling it again gives the same object.

    Raises:
        ConfigError: the script was started by another launcher with several processes.
    """
    if _here.pace is None:
        if _here.exchange is None:
            _refuse_other_launchers()
        _here.pace = Pace(_here.exchange or SoloExchange(), _here.context)
    return _here.pace


def current() -> StoreExchange:
    """This member's part in its run, or in the trial that it is in."""
    assert _here.exchange is not None
    return _here.exchange


def finish() -> None:
    """Called once in a member after the script has run: it has no more updates to make."""
    if _here.pace is not None:
        _here.pace.finish()


def _refuse_other_launchers() -> None:
    if _STARTED_BY in os.environ:
        return  # its WORLD_SIZE is the worker's that has started it, and prepare() says so
    size = os.environ.get("WORLD_SIZE", "1")
    if size.isdigit() and int(size) > 1:
        raise ConfigError(
            f"the script was started with WORLD_SIZE={size} by another launcher, which has set no "
            "RANK and MASTER_ADDR, where all meet; set them, or start it with "
            f"paceline launch --workers {size} SCRIPT"
        )


def _refuse_inside_a_worker(exchange: Exchange) -> None:
    """``torch.multiprocessing.spawn(train, ...)`` in a worker: it would train once for each."""
    whose = os.environ.get(_STARTED_BY)
    if (
        whose
        and isinstance(exchange, SoloExchange)
        and multiprocessing.parent_process() is not None
    ):
        raise ConfigError(
            f"prepare() was called in a process that {whose} has started by multiprocessing: it "
            "would train by itself, once for each worker; paceline launch starts the workers: call "
            "the function that trains directly, without spawn and without a flag that asks for it"
        )


def _as_given(ready: list[Any]) -> Any:
    """One as it is, several as a tuple."""
    return ready[0] if len(ready) == 1 else tuple(ready)


def _checked(batch: str | None, fast: str) -> str:
    """``fast``; ConfigError where ``prepare`` was given another word than it knows."""
    if batch not in ("global", "per-worker", None):
        raise ConfigError(f"batch must be 'global' or 'per-worker', got {batch!r}")
    if fast not in ("auto", "none"):
        raise ConfigError(f"fast must be 'auto' or 'none', got {fast!r}")
    return fast


def _batch_of(objects: tuple[Any, ...], batch: str | None) -> str:
    """What a batch is; of a range's numbers each is one worker's.

    Raises:
        ConfigError: they were to be shared.
    """
    if not any(isinstance(getattr(one, "dataset", None), OfRange) for one in objects):
        return batch or "global"
    if batch == "global":
        raise ConfigError(
            "a range in prepare(batch='global'): a number of it is one worker's mini-batch, and "
            "cannot be shared; leave batch out, or make a DataLoader of what is taken by it"
        )
    return "per-worker"


def _number_of(accumulate: object) -> int:
    if (number := whole(accumulate)) is None or number < 1:
        raise ConfigError(f"accumulate must be a number >= 1, got {accumulate!r:.60}")
    return number


def _beside_accumulation(num_batches: int, what: str) -> ConfigError:
    return ConfigError(
        f"accumulate {num_batches} beside {what}: several workers share the samples of an update, "
        "and not batch by batch; accumulate by hand: if (i + 1) % n == 0 or i + 1 == len(loader)"
    )


_NAME = re.compile(r"[A-Za-z0-9_][\w.,=+@-]{0,99}")
"""Of a trial: it is also its folder's."""


def _failure(error: Exception, seat: int) -> str:
    """What left a trial, and where in the script."""
    if isinstance(error, PacelineError):
        return str(error)
    here = str(Path(__file__).parents[1])
    frames = [one for one in traceback.extract_tb(error.__traceback__) if here not in one.filename]
    where = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    first = str(error).strip().partition("\n")[0]
    return f"worker {seat} failed in it{where}: {type(error).__name__}: {first:.300}"


def _like(over: TrialOver, name: str) -> Exception:
    """What leaves a trial here, where another worker failed in it: of the same class, if known."""
    module, _, path = over.kind.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    is_known = isinstance(found, type) and issubclass(found, Exception)
    made: Exception = Exception.__new__(found if is_known else WorkerError)
    made.args = (f"trial {name!r} is over in all workers: {over.text}",)
    return made


class Pace:
    """A script's part in a run.

    Attributes:
        device: where this worker computes.
        worker, num_workers: this worker's number, and how many there are.
        is_main: whether this worker prints and saves.
        seed: of the run. A member of it begins seeded with it, before the script does; what the
            script seeds itself counts from there on. A script that ``python`` runs is not seeded.
    """

    def __init__(self, exchange: Exchange, context: Context) -> None:
        self._trials: list[str] = []
        """Those that the script has entered, by name."""
        self._in_trial = ""
        self._begin(exchange, context)

    def _begin(self, exchange: Exchange, context: Context) -> None:
        """What a run, or a trial, begins with."""
        self._originals: list[Originals] = []
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
    def turn(self) -> int:
        """Which of the n updates of ``pace.updates(n)`` this turn makes, or helps to make.

        From 0 to n - 1, as the numbers of a loop ``for turn in range(n)`` in one process are: the
        number that was drawn, over those that an update averages. Where a turn steps several times
        (two optimizers, or one twice) and each step is a version, ``version`` runs ahead of it.

        Raises:
            ConfigError: there is a loader, or no loop yet.
        """
        if self._prepared is None or self._prepared.source.numbers is None:
            raise ConfigError(
                "pace.turn is of a loop over pace.updates(n) without a loader; how far training is "
                "says pace.version"
            )
        return self._updates.turn

    @property
    def context(self) -> Context:
        """What this worker was told of the run when it began."""
        return self._context

    @property
    def is_stopped(self) -> bool:
        """Whether the run is asked to end, or over."""
        self._exchange.has_told_place = True
        return self._exchange.is_stopped

    @property
    def is_cut_short(self) -> bool:
        """Whether the pass that the loader made last was left empty by the end of the run."""
        return self._exchange.is_cut_short

    def print(self, *values: object, **options: Any) -> None:
        """Print in the main worker only."""
        if self.is_main:
            print(*values, **options)  # noqa: T201  it is what the user asked for

    def log(self, values: Mapping[str, Value]) -> None:
        """Record numbers for the run's log.

        The main worker's count; in a loop over numbers (``updates`` without a loader), where each
        is one worker's alone, those of whoever records them.

        Raises:
            ConfigError: a name is no text.
        """
        if odd := [name for name in values if not isinstance(name, str)]:
            raise ConfigError(f"pace.log takes numbers by name, got the name {odd[0]!r}")
        if self.is_main or self._draws_alone:
            self._exchange.log({name: float(value) for name, value in values.items()})

    @property
    def _draws_alone(self) -> bool:
        """Whether the script is at a number of its loop, which no other worker comes by."""
        prepared = self._prepared
        return (
            prepared is not None
            and prepared.source.numbers is not None
            and prepared.loop.is_iterating
        )

    def describe(
        self,
        *,
        task: str,
        source: str,
        notes: Sequence[str],
        epochs: int,
        own_batch_size: int | None = None,
    ) -> None:
        """What the plan shows of the task; before ``prepare``.

        Args:
            own_batch_size: samples an update averages at the task's own learning rate.
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

        The objects stay the user's own, except for the loader; they come back in the same order.

        Called once more with a further ``DataLoader`` it gives one for use inside the prepared
        loader's loop: with each mini-batch of that comes the same share of the batch that belongs
        to it, so the workers together have what one process has. Each ``next()`` belongs to one
        mini-batch; an iterator is opened before the loop, and another one where it has ended::

            loader_b = pace.prepare(loader_b)
            for (x, y), (u, _) in zip(loader, loader_b): ...

        ``itertools.cycle`` keeps batches by itself, which are other ones in each worker: it is
        refused. A batch to look at: ``next(iter(loader_b.plain))``. Workers of it fetch ahead as
        far as the prepared loader's do.

        Args:
            objects: any number of each ``nn.Module``, ``Optimizer`` and LR scheduler, and one
                ``DataLoader`` over a data set or a stream. In the place of a loader a ``range``
                whose numbers the loop goes through in each epoch, and takes its batches by:
                each number is a mini-batch of one worker, as with batch="per-worker", and comes
                once an epoch. Without either: see ``updates``.
            batch: "global": the loader's batch size is what an update averages, shared by its
                mini-batches; "per-worker": it is one mini-batch (DDP's meaning). None: "global",
                and for a further loader what the first call said.
            sticky: each worker keeps its part of every batch, in order: for a state that the script
                carries from batch to batch, as an RNN's. Under full-sync and local-sgd.
            fast: "auto": measure what makes a step faster here, and keep it; "none": nothing is
                tried; None: what ``--fast`` says.
            forward: (model, batch) -> loss, as the loop computes it; a trial uses it. Without it
                ``model(batch[0])`` is called and a loss is made up.
            accumulate: K >= 1 batches of the loader make an update, for a loop that steps on each
                and is not changed; ``--accumulate`` counts before it. The first K - 1 ``step()``
                set their gradient aside, the K-th steps on the mean, as does the last of an
                epoch on what is there. That is the loop that adds up the gradients of ``loss *
                len(batch)`` and, ``if (i + 1) % K == 0 or i + 1 == len(loader)``, divides by the
                samples and steps: a batch weighs by its samples (a short last one less than in
                Accelerate, where each weighs 1 / K), or by ``step.weight``. Clips of ``pace`` and
                prepared schedulers act with updates, ``len(loader)`` counts batches, ``version``
                and ``updates`` count updates. A loop that is left early drops what is set aside.
            closures: whether an optimizer of your own may call the model again inside its step
                (SAM): under full-sync all workers make each step together then, each evaluation
                with the mean gradient and the mean loss of all. LBFGS needs no saying so. An
                optimizer inside it, which its ``state_dict()`` leaves out, is kept by ``keep``.
            together: whether the loop counts on workers that step together, as one that sets a
                rate by hand for each step does: under k-sync, async and their kin it is refused
                here, and not where it first goes wrong.
            split: how the model is divided among the ranks of a run: "data" (each has all of it),
                "network:2" (two parts, one behind the other; "network": as many as workers), "2x2"
                (two parts in two copies), "layer" (channels of pairs of layers), "shard" or
                "shard:3" (pieces of everything; "shard:2" of gradients and optimizer state,
                "shard:1" of that alone). Each worker goes on with mini-batches of its own, and
                holds and steps its part. None: what ``--split`` says.

        Raises:
            ConfigError: something cannot be carried; it is named.
        """
        fast = _checked(batch, self._context.fast if fast is None else fast)
        refuse_apart(self._context, is_asked=together)
        _refuse_inside_a_worker(self._exchange)
        num_batches = self._batches_of_update(accumulate, is_sticky=sticky)
        objects = self._of_this_trial(objects, split)
        if self._prepared is not None:
            return self._prepare_beside(self._prepared, objects, batch)
        if self._in_trial:
            self._originals.append(Originals([x for x in objects if not isinstance(x, DataLoader)]))
        exchange, self._batch = self._exchange, _batch_of(objects, batch)
        asked = PrepareOptions(
            batch=self._batch, fast=fast, forward=forward, accumulate=num_batches,
            is_sticky=sticky, closures=closures, split=split,
        )  # fmt: skip
        self._prepared = prepared = Prepared(
            exchange, self._context, objects, self.device, self._keeper, asked
        )
        source = prepared.source
        self._loader = loader = PreparedLoader(
            prepared.loop, prepared.schedules, source.shape, source.num_batches, self._passes
        )
        self._attach(prepared, loader)
        self._updates = UpdateLoop(
            loader, source.numbers, exchange, self._context, counts_blocks=prepared.steps_apart
        )
        self._keeper.add("published", lambda: self._published_at, self._set_published_at)
        self._keeper.add("updates", self._updates.remember, self._go_on_with_updates)
        return _as_given([loader if isinstance(one, DataLoader) else one for one in objects])

    def _batches_of_update(self, accumulate: int, *, is_sticky: bool) -> int:
        """How many of the loader's make one; ConfigError: more than one, and they cannot."""
        num_batches = self._context.accumulate or _number_of(accumulate)
        if num_batches > 1 and is_sticky:
            raise _beside_accumulation(num_batches, "prepare(sticky=True)")
        return num_batches

    def _of_this_trial(self, objects: tuple[Any, ...], split: str | None) -> tuple[Any, ...]:
        """What prepare was given, where a loader that an earlier trial gave back is the plain one
        that it was, and a range a loader of its numbers.

        Raises:
            ConfigError: there are trials, and this stands in none; it splits a model in one.
        """
        if self._in_trial and divides(split or self._context.split):
            raise ConfigError(
                "a split model in pace.trial(), which gives it back whole, is not carried: train "
                "it in a run of its own, or use --split data"
            )
        if self._trials and not self._in_trial:
            raise ConfigError(
                f"prepare() stands outside of pace.trial(), after trial {self._trials[-1]!r}: a "
                "script trains in trials, or without any; put what it trains then into a trial, too"
            )
        loaders = PreparedLoader | SecondLoader
        plain = [
            one.plain if isinstance(one, loaders) and one.is_released else one for one in objects
        ]
        return tuple(through(one) if isinstance(one, range) else one for one in plain)

    def _attach(self, prepared: Prepared, loader: PreparedLoader) -> None:
        """Join the others, or say what was found."""
        loader.asked_epochs = self._context.epochs
        if (exchange := self._exchange.shared) is not None:
            prepared.attach(exchange)
            if exchange.begins[0]:  # it joins a run that is under way
                loader.passes = self._passes = Passes(*exchange.begins)
                self._passes.num_counted = 0  # it trains on after the others' end, which says so
            return
        for line in prepared.settled.notes:
            self.print(line)

    def _go_on_with_updates(self, state: list[int]) -> None:
        last, passes = self._updates.go_on(state), self._passes
        passes.num_counted = max(0, min(passes.num_counted, passes.first - 1 - last))

    def _set_published_at(self, place: list[int]) -> None:
        self._published_at = [integer(one) for one in place]

    def _prepare_beside(
        self, prepared: Prepared, objects: tuple[Any, ...], batch: str | None
    ) -> Any:
        """Further loaders, each with a batch for each of the first one's."""
        if (accumulation := prepared.loop.accumulation) is not None:
            raise _beside_accumulation(accumulation.num_batches, "a second prepared loader")
        for one in objects:
            if not isinstance(one, DataLoader):
                raise ConfigError(
                    f"prepare() was called twice, with a {type(one).__name__}; prepare everything "
                    "in one call, and in another one further DataLoaders alone: "
                    "loader_b = pace.prepare(loader_b)"
                )
        loop, batch = prepared.loop, batch or self._batch
        return _as_given([self._beside(loop, loader, batch) for loader in objects])

    def _beside(self, loop: TrainingLoop, loader: DataLoader[Any], batch: str) -> SecondLoader:
        context, keeper = self._context, self._keeper
        number = sum(isinstance(one, SecondLoader) for one in loop.beside) + 1
        found = SecondLoader(
            self._loader,
            loop,
            loader,
            size=(loader.batch_size or 1) * (context.parts if batch == "per-worker" else 1),
            seed=mix(self.seed, number, BESIDE_SALT),
            averages=context.averages and not context.is_difference,
        )
        if (exchange := self._exchange.shared) is not None:
            loop.beside.append(found)
            hooks, digest = exchange.hooks, exchange.hooks.order_digest
            hooks.order_digest = lambda: f"{digest()} {found.fingerprint()}"
            keeper.add(f"order {number}", *found.keep_order())
            keeper.add(f"loader {number}", found.remember, found.go_on)
        return found

    # -- several trainings in one script --------------------------------------------------------

    @contextlib.contextmanager
    def trial(self, name: str | None = None) -> Iterator[None]:
        """A block that trains by itself: several in one script, one after another, as in a search.

        Each is a whole run of the same workers, with a plan, a folder and a summary of its own.
        ``prepare``, the loop, ``evaluate``, ``save``, ``keep_best``, ``stop_when`` and ``stop``
        belong to the trial that they stand in; ``--epochs``, ``--updates``, ``--seconds`` and
        ``--target-accuracy`` hold for each. Afterwards what was prepared is plain PyTorch again: a
        model with the weights that it came to, an optimizer with its state, a loader.

        A trial begins with the random state that the script is in, and leaves it as it found it.
        So trials in a row between which the script draws nothing all begin alike, each gives what
        it gives alone, wherever it stands, and what is seeded or drawn between them counts. What is
        to differ from trial to trial is drawn before the block.

        An exception that leaves the block ends the trial in all workers, and the block raises one
        of its class in each, so whoever catches it goes on in all alike. Ctrl-C and signals end the
        whole run: trials that come later do not train. A worker that dies is missing in those
        after it.

        Args:
            name: of the trial, and of its folder in the run's; None: trial-1, trial-2, ...

        Raises:
            ConfigError: it stands in another trial, or beside a ``prepare`` that is in none; the
                name was used, or is none for a folder; workers enter different ones.
            WorkerError: another worker has failed in it, with what is not known here.

        Example::

            for lr in (0.3, 0.1, 0.03):
                with pace.trial(f"lr-{lr}"):
                    model = make()
                    optimizer = SGD(model.parameters(), lr=lr)
                    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(...))
                    for epoch in pace.epochs(3):
                        ...
                    found[lr] = pace.evaluate(count, test)
        """
        name = self._name_of_trial(name)
        outside, before = vars(self).copy(), _here.exchange
        if self.device.type == "cuda":  # its random state is kept, too
            torch.cuda.init()
        with kept_random_state(), kept_process():
            exchange, context = self._open_trial(name)
            self._begin(exchange, context)
            self._in_trial = name
            error: BaseException | None = None
            try:
                yield
                self._leave_trial()
            except BaseException as one:  # a trial may end in any way; the others must hear of it
                if exchange.shared is not None and not isinstance(one, Exception | Stopped):
                    raise  # the script ends
                error = one
            over = self._close_trial(error)
            vars(self).clear()
            vars(self).update(outside)
        _here.exchange, self._exchange.is_cut_short = before, exchange.is_cut_short
        if (member := self._exchange.shared) is not None:
            member.come_back(is_main=over.is_main)
        is_own = isinstance(error, Exception) and not exchange.is_cut_short
        if over.text and not is_own:
            raise _like(over, name) from None
        if error is not None:
            raise error

    def _name_of_trial(self, name: str | None) -> str:
        """The name, which nothing is in the way of. ConfigError: something is."""
        if self._in_trial:
            raise ConfigError(
                f"pace.trial() stands inside trial {self._in_trial!r}; end the one before the next"
            )
        if self._prepared is not None:
            raise ConfigError(
                "pace.trial() comes after a prepare() that stands in no trial: a script trains in "
                "trials, or without any; put that prepare() and its loop into a trial of its own"
            )
        found = f"trial-{len(self._trials) + 1}" if name is None else name
        if not isinstance(found, str) or not _NAME.fullmatch(found):
            raise ConfigError(
                f"pace.trial({found!r:.120}): the name is one for a folder, of letters, digits and "
                "_ . , = + @ -, at most 100: pace.trial(f'lr-{lr}')"
            )
        if found in self._trials:
            raise ConfigError(
                f"pace.trial({found!r}) was entered before; give each trial a name of its own, or "
                "none: pace.trial()"
            )
        self._trials.append(found)
        return found

    def _open_trial(self, name: str) -> tuple[Exchange, Context]:
        """Wait for all workers; this one's part in the trial."""
        outside, context = self._exchange, self._context
        if (member := outside.shared) is not None:
            _here.exchange, text = member.begin_trial(name)
            told = Context.read(json.loads(text))
            return _here.exchange, replace(told, is_own_process=context.is_own_process)
        alone = SoloExchange()
        if outside.is_stopped:
            alone.ask_to_stop()
        return alone, replace(context, run_dir=str(Path(context.run_dir or ".") / name))

    def _leave_trial(self) -> None:
        """The block is over: what it has begun comes to its end."""
        self.finish()
        if self._prepared is not None:
            self._prepared.loop.end_iteration()

    def _close_trial(self, error: BaseException | None) -> TrialOver:
        """Wait until all have left it, and be plain again.

        Raises:
            Stopped: this worker failed, and cannot leave the others: the run ends with that.
        """
        over = TrialOver("", "", is_main=True)
        if (member := self._exchange.shared) is not None:
            if isinstance(error, Exception) and not member.is_cut_short:
                self._fail_trial(member, error)
            over = member.end_trial()
        self._take_back()
        return over

    def _fail_trial(self, member: StoreExchange, error: Exception) -> None:
        text, kind = _failure(error, member.seat), type(error)
        member.fail_trial(text, f"{kind.__module__}:{kind.__qualname__}")
        try:
            if self._prepared is not None:
                self._prepared.loop.abandon()
        except Stopped:
            return  # it was on its way
        except Exception:  # whatever taking leave raises, the failure itself counts
            member.fail(text, is_yours=isinstance(error, ConfigError))
            raise Stopped from error

    def _take_back(self) -> None:
        """What was prepared is the script's own again."""
        if self._prepared is not None:
            self._prepared.release()
        for one in self._originals:
            one.put_back()
        unlisten()
        unguard()
        leave_scalers()

    # -- the loop -------------------------------------------------------------------------------

    def epochs(self, epochs: int | Sequence[int]) -> Iterator[int]:
        """The numbers of the epochs; ends early when the run is stopped.

        A run that goes on begins with the epoch that was cut off, and the loader has its rest.

        Args:
            epochs: how many, numbered from 0; or the values themselves, as ``range(1, n + 1)`` or
                a list. ``--epochs`` of the command line replaces their number.

        Raises:
            ConfigError: it is neither, a list has fewer values than ``--epochs`` asks for, or the
                run goes on with a value that it has not.
        """
        values = values_of(epochs, self._context.epochs)
        if self._prepared is not None and self._prepared.source.numbers is not None:
            raise ConfigError(
                "pace.epochs() goes over a loader, and prepare() was given none: "
                "for number in pace.updates(2000), or give prepare() the loader"
            )
        return self._each_epoch(values)

    def updates(
        self, updates: int | None = None, loader: PreparedLoader | None = None
    ) -> Iterator[Any]:
        """The loop of a script that counts updates: it ends everywhere at this version.

        With several optimizers it counts blocks, also where each of their steps is a version.

        Over a loader it gives its mini-batches, pass after pass, the last one cut short. Without
        one it numbers the draws that the script makes by itself: each stands for one mini-batch,
        all random state is seeded by it, and it counts once, so a draw that is done again, by
        whomever, is the same. Update v averages the numbers v K to v K + K - 1 (K: the protocol's;
        one for one worker). Called again with more, it goes on from there; the version counts from
        the beginning of the run, so ``pace.updates(pace.version + n)`` makes n more.

        Args:
            updates: the version to end with; None: it goes on until a worker leaves the loop (by
                ``break``), or ``pace.stop()``, ``pace.stop_when`` or ``--updates`` ends the run.
            loader: as ``prepare`` gave it back; None: it was given none.

        Returns:
            Mini-batches, or the numbers that this worker is granted. Before each number
            ``paceline.step_seed(pace.seed, 0, number)`` seeds Python, NumPy and torch.

        Raises:
            ConfigError: ``prepare`` was not called, or with a loader where there is none here, or
                the other way round; ``updates`` is no number; a whole pass makes no update.

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
                "(pace.updates); to end it sooner: --updates"
            )
        if prepared.source.numbers is None and not isinstance(loader, PreparedLoader):
            raise ConfigError(
                "prepare() was given a loader, and pace.updates() was not given what came back for "
                f"it: for batch in pace.updates({updates}, loader)"
            )
        if prepared.source.numbers is not None and loader is not None:
            raise ConfigError(
                "pace.updates() was given a loader that prepare() was not: "
                "model, optimizer, loader = pace.prepare(model, optimizer, loader)"
            )
        if prepared.source.is_stream and prepared.steps_apart:
            raise ConfigError(
                "pace.updates() cannot tell how many mini-batches of a stream several optimizers "
                "step on, where each step is an update of all workers (full-sync): go by epochs, "
                "or use another protocol"
            )
        if self._updates.has_begun and self._exchange.version >= count:
            self.print(
                f"note: pace.updates({count}) makes none: the run is at version "
                f"{self._exchange.version}; pace.updates(pace.version + n) makes n more"
            )
        return self._updates.each(count)

    def finish(self) -> None:
        """The script is over: what it counted by updates comes to its end with all others'."""
        if self._prepared is not None:
            self._prepared.loop.check_leaving()
        if self._passes.has_missed and not self._exchange.is_stopped:
            raise not_among(self._passes.place.value, None)
        if self._prepared is not None and self._updates.has_begun:
            self._prepared.loop.end_iteration()
            self._say_what_did_nothing()
            self._exchange.rest(self._passes.next)
        if (member := self._exchange.shared) is not None:
            member.come_to_end(End.OVER)

    def _say_what_did_nothing(self) -> None:
        """Metrics that were asked for, and that no evaluation had."""
        alone, best = self._exchange.alone, self._best
        names = [] if alone is None else alone.rules.unmeasured()
        calls = [f"pace.stop_when({name!r})" for name in names]
        if best is not None and best.name is not None and not best.has_measured:
            calls.append(f"pace.keep_best({best.name!r})")
        for call in calls:
            self.print(f"note: {call} did nothing: no pace.evaluate measured that")

    def _each_epoch(self, values: Sequence[int]) -> Iterator[int]:
        passes = self._passes
        first = passes.enter(values)
        if first is None:
            return
        if (member := self._exchange.shared) is not None:
            member.is_over = False
        for index in range(first, len(values)):
            if self._exchange.is_stopped:
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

    def _finish_leaving(self) -> None:
        """Where an exception left the loop and was caught, others still count on this worker."""
        if self._prepared is not None:
            self._prepared.loop.finish_leaving()

    def _after_prepare(self, name: str) -> Prepared:
        """Raise ConfigError where nothing is prepared yet."""
        if self._prepared is None:
            raise ConfigError(f"pace.{name}() comes after pace.prepare(model, optimizer, loader)")
        return self._prepared

    def step(self) -> Step:
        """One step on one mini-batch; left early when its work is superseded.

        Logging belongs inside the block, or after ``if step.was_superseded: continue``.
        """
        prepared = self._after_prepare("step")
        prepared.step.begin()
        return Step(prepared.loop, prepared.explain)

    def backward(self, loss: Tensor) -> None:
        """``loss.backward()``, outside autocast; in fp16 the loss is scaled. It is recorded."""
        self._after_prepare("backward").gradients.backward(loss)

    def autocast(self, dtype: torch.dtype | None = None) -> torch.autocast:
        """Mixed precision for a forward pass: of ``--precision``, else bfloat16, or ``dtype``.

        With float16 call ``pace.backward(loss)``: it scales the loss, ``clip_grad_norm_`` and
        ``optimizer.step()`` unscale the gradients, and an update that overflowed is skipped in all
        workers alike and counts for no scheduler.
        """
        return self._after_prepare("autocast").gradients.amp.autocast(dtype)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the *averaged* gradient of the update to ``max_norm``, after the last backward.

        With one plain worker, and under local-sgd where each steps by itself, it is torch's own.

        Args:
            parameters: all of the model's that have gradients.
            max_norm: >= 0, the same in every worker.
            norm_type: 2, but where it is torch's own.

        Returns:
            The norm before clipping: at once where it is torch's own, else once
            ``optimizer.step()`` is done, of the update that used this step's gradient; nan where
            none has used it by then, as under protocols that go on before an update is full.

        Raises:
            ConfigError: it is given a part of the gradients, workers disagree, or somebody looks
                at a norm that is not there yet.
        """
        return self._after_prepare("clip_grad_norm_").gradients.clip_norm(
            parameters, max_norm, norm_type
        )

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip each element of the *averaged* gradient to [-clip_value, clip_value].

        With ``clip_grad_norm_`` in the same step it comes after it. Else as ``clip_grad_norm_``.
        """
        self._after_prepare("clip_grad_value_").gradients.clip_value(parameters, clip_value)

    @contextlib.contextmanager
    def edit_gradients(self) -> Iterator[None]:
        """Inside, what changes ``.grad`` acts on this worker's own part, before it is averaged.

        Between ``backward()`` and ``optimizer.step()``; outside it such a change is refused where
        an update averages several workers' parts. What is linear (a factor, a mask, centralising)
        comes out as on the whole; what is not (clamping, a norm, noise) does not.

        Example::

            with pace.edit_gradients():
                for parameter in model.parameters():
                    parameter.grad -= parameter.grad.mean()
        """
        edits = self._after_prepare("edit_gradients").gradients.edits
        with contextlib.nullcontext() if edits is None else edits.allowed():
            yield

    # -- beside the loop ------------------------------------------------------------------------

    def evaluate(
        self,
        fn: Callable[[Any], Mapping[str, tuple[Value, Value]]],
        loader: DataLoader[Any] | PreparedLoader | SecondLoader,
    ) -> Totals:
        """Sums over what ``loader`` gives, at one version, the same totals in all workers.

        Its sampler, batch sampler and ``drop_last`` count. Between epochs all workers share the
        work, each batch once; inside one, the caller does it alone at the version that it holds.
        With several workers the order is drawn once and alike, and each batch is made under a
        random state of its own, which depends on seed, version and position alone, by the loader's
        ``num_workers`` where it has any; one worker iterates the loader as plain PyTorch does. What
        was drawn by several changes nothing that the script draws afterwards.

        Args:
            fn: batch -> {name: (sum over samples, number of samples)}; run without gradients and
                with the model in evaluation mode. Afterwards each module is in its own mode again,
                by its own ``train()``.
            loader: a DataLoader; a prepared one counts as the plain one that it was. Over an
                iterable data set with one worker only.

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
        found = evaluation.totals(fn, loader)
        if self._best is not None and prepared is not None and (is_inside or self.is_main):
            self._best.look(found, self.version, lambda: model_file(prepared.whole))
        return found

    def keep_best(self, name: str, most: int = 1, mode: str | None = None) -> None:
        """Keep the models of the best evaluations, as ``--keep-best`` keeps one.

        Every ``pace.evaluate`` that measures ``name`` counts, between epochs and inside one. The
        best lies in the run's folder as ``best.safetensors``; with ``most`` > 1 each that is kept
        as ``best-VERSION.safetensors``, too. ``best.json`` lists them, the best first. They load
        as what ``save`` writes.

        Args:
            name: of the metric.
            most: models to keep, >= 1.
            mode: "max" or "min": which of two is better; None: by the words of its name, as less
                of a loss, an error or a perplexity, and more of an accuracy.

        Raises:
            ConfigError: it was called before, a value is none that it can be, or the name does not
                tell which way is better and ``mode`` is not given.
        """
        if self._best is not None and self._best.name is not None:
            raise ConfigError("pace.keep_best() was called twice; one metric says what is best")
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
        """End the whole run by a metric: where it is good enough, or grows better no more.

        Every ``pace.evaluate`` that measures ``name`` counts, also one that a worker makes by
        itself inside its loop (of several at one version the first, under local-sgd of weights
        that are its own); a run that goes on counts those before, too. Called again, each rule
        holds. The run ends as by ``stop``.

        Args:
            name: of the metric.
            above, below: end where it is at least, at most so much.
            patience: end after this many evaluations in a row without an improvement, >= 1.
            min_delta: what is better by no more than this is no improvement, >= 0.
            mode: as for ``keep_best``; bounds alone need none.

        Raises:
            ConfigError: nothing was asked for, a value is none that it can be, or patience is asked
                for and the name does not tell which way is better.

        Example::

            pace.stop_when("acc", above=0.9)
            pace.stop_when("val_loss", patience=3)
        """
        self._exchange.stop_when(
            rule_of(
                name, above=above, below=below, patience=patience, min_delta=min_delta, mode=mode
            )
        )

    def publish(self, model: torch.nn.Module) -> None:
        """The script has changed weights by itself, and means it: they are the run's from now on.

        Without it such a change is refused by name. Between epochs (a layer that begins again,
        pruning, a checkpoint that is loaded) the main worker's weights are what all get when the
        next epoch begins; an evaluation before that is refused unless all workers have made the
        same change. Inside the loop, right behind the change, one worker and local-sgd carry it:
        there it is a part of what the worker has learned by itself. What an optimizer keeps for
        each weight stays as it is; before the first epoch, and for ``python train.py``, it does
        nothing.

        Args:
            model: one that was prepared, or a part of it.

        Raises:
            ConfigError: it was not prepared; it stands inside the loop where an update averages
                several workers' gradients; the main worker published nothing, and another did.

        Example::

            for epoch in pace.epochs(20):
                if epoch == 10:
                    model.head.reset_parameters()
                    pace.publish(model)
                for inputs, targets in loader:
                    ...
        """
        prepared = self._prepared
        every = (
            () if prepared is None else (one for each in prepared.models for one in each.modules())
        )
        if prepared is None or all(one is not model for one in every):
            raise ConfigError(
                f"pace.publish() was given a {type(model).__name__} that prepare() was not: "
                "model, optimizer, loader = pace.prepare(model, optimizer, loader)"
            )
        if (member := self._exchange.shared) is not None:
            self._publish(member)

    def _publish(self, member: StoreExchange) -> None:
        if self._passes.is_before:
            return  # what was trained since lies behind it
        place = [self._passes.place.position, self._passes.next]
        is_new = member.has_opened or place != self._published_at
        self._published_at = place
        if is_new:  # else a checkpoint has it, and the script comes by once more
            member.publish(self._context.protocol)

    @overload
    def sum(self, value: float) -> float: ...

    @overload
    def sum(self, value: Tensor) -> Tensor: ...

    def sum(self, value: Value) -> Tensor | float:
        """The sum of ``value`` over all workers; all must call it between epochs.

        Inside the loop (full-sync, local-sgd) all must come by equally often. Where one does the
        mini-batches of another that has died, and so does not, the run ends rather than wait.

        Args:
            value: a number, or a tensor of the same shape in every worker, whose sum is taken
                number by number, in one round of all workers. It takes no part in a gradient.

        Returns:
            a number for a number; for a tensor one of its shape and on its device. Numbers with a
            point keep their type, those of 16 bits come as ``float32``, whole ones and truths as
            ``int64``, as ``torch.sum`` gives them.

        Raises:
            ConfigError: a tensor is complex, or of another shape in another worker; it stands
                inside the loader's loop where workers go at their own pace, or at a batch of fewer
                samples than there are workers, or before it, or before ``prepare``.
        """
        self._finish_leaving()
        prepared = self._prepared
        is_inside = prepared is not None and prepared.loop.is_iterating
        if is_inside and self.num_workers > 1 and not self._context.is_spmd:
            raise ConfigError(
                f"pace.sum() stands inside the loader's loop, where under {self._context.protocol} "
                "each worker has mini-batches of its own and not all come by; put it between epochs"
            )
        few = prepared.few_samples if prepared is not None and is_inside else None
        if few is not None:
            raise ConfigError(
                f"pace.sum() stands inside the loader's loop, where this batch or the next has "
                f"{few} samples for {self.num_workers} workers, so that not all come by; put it "
                "between epochs, or give the loader drop_last=True"
            )
        if self.num_workers > 1 and prepared is None:
            raise ConfigError(
                "pace.sum() was called before pace.prepare(): several workers meet there first"
            )
        if isinstance(value, Tensor):
            return _as_tensor_like(value, self._exchange.sum(_numbers_of(value)))
        return self._exchange.sum([float(value)])[0]

    @contextlib.contextmanager
    def once(self) -> Iterator[bool]:
        """A block that the main worker goes through first, and all others after it.

        For what must not happen in several workers at the same time: a download, preprocessing
        into a cache, making a folder. It may stand anywhere between ``connect`` and the end but
        inside the loader's loop; all workers must come by. If the main worker dies inside,
        another one becomes the main one and goes first. With one worker it costs nothing.

        Returns:
            (as ``with ... as is_first``) whether this worker goes first.

        Raises:
            ConfigError: it stands inside the loader's loop.

        Example::

            with pace.once():
                data = MNIST("data", download=True)
        """
        if self._prepared is not None and self._prepared.loop.is_iterating:
            raise ConfigError(
                "pace.once() stands inside the loader's loop, where each worker has batches of its "
                "own and not all come by; put it before the loop or between epochs, or write "
                "if pace.is_main:"
            )
        with self._exchange.once() as is_first:
            yield is_first

    def save(
        self, name: str = "model.safetensors", *, model: torch.nn.Module | None = None
    ) -> Path:
        """Save the model's parameters and buffers into the run's folder.

        The main worker does; in a loop over numbers (``updates`` without a loader), where each is
        one worker's alone, whoever comes by: ``if number % 100 == 0: pace.save()``. The file
        loads without Paceline: ``load_state_dict(safetensors.torch.load_file(path))``.

        Args:
            model: which of several; None: all, as ``nn.ModuleList`` names them (``0.weight``).

        Raises:
            ConfigError: it was not prepared.
        """
        from ..checkpoints.state import save_model, save_tensors

        prepared = self._after_prepare("save")
        if model is not None and not any(model is one for one in prepared.models):
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
        """Keep these in checkpoints, and put them back now where the run goes on.

        For what the loop holds beside model, optimizer, schedulers and scaler: an averaged model,
        a best accuracy, a sampler with a state, a ``torch.Generator``. The main worker's count.

        Args:
            things: objects with ``state_dict()`` and ``load_state_dict()``, or generators with
                ``get_state()`` and ``set_state()``; numbers, texts, tensors, lists and dicts in
                them are kept, without pickle.

        Raises:
            ConfigError: one has neither, or a name is given twice.

        Example::

            pace.keep(ema=ema_model, best=best)
        """
        self._exchange.has_told_place = True
        for name, thing in things.items():
            self._keeper.keep(name, thing)

    def stop(self) -> None:
        """End the whole run at the next step border."""
        self._exchange.ask_to_stop()
