"""What ``prepare`` makes of a script's objects: the parts that take part in a run.

    loop         mini-batches come and go            step        optimizer.step pushes
    gradients    what lies in .grad between          schedules   learning rates
    settled      how this worker computes            leased      the user's loader, lease by lease

The optimizer, the model and the schedulers stay the user's objects. Above 300 lines because all
parts are made, joined and described in one place. This module must not know how
an exchange carries anything.
"""

import re
from collections.abc import Callable, Sequence, Sized
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from ..checkpoints.state import can_be_packed
from ..checkpoints.writer import CUT, unwritable
from ..compression import parse as parse_compression
from ..context import Context
from ..data.feed import SeededData
from ..data.likeness import sample_digests
from ..data.numbers import OfRange, note, note_of_range
from ..data.streamed import StreamedLoader
from ..errors import ConfigError
from ..exchange.base import Exchange
from ..exchange.compressed import CompressedGradient
from ..exchange.priced import price_alone
from ..exchange.through_store import StoreExchange
from ..partition.names import SplitName, divides
from ..plan import CompressionPrice
from ..protocols.outer import parse_outer
from ..replica.held import RESIZE_BEFORE
from ..replica.held_state import SharedStates
from ..replica.layers import (
    Modes,
    WrittenBuffers,
    batch_norm_note,
    gradient_hooks_note,
    grain,
    late_buffer_note,
    own_buffer_note,
    parameter_table,
    unwatch_forward,
    watch_forward,
)
from ..replica.rates import (
    RateScaling,
    StepsOnEach,
    Warmup,
    make_warmup,
    note_of_warmup,
    scale,
)
from ..replica.replica import (
    Replica,
    refuse_another_device,
    refuse_observers,
    refuse_shared_memory,
    refuse_what_cannot_be_carried,
    refuse_without_size,
)
from ..replica.seeding import random_states, restore_random_states
from ..spread.asked import refuse_objects, split_of, spread_over
from ..spread.base import SpreadModel
from ..store.control import MOST_SCHEDULES
from ..store.fragments import Fragments
from ..store.joint import joined, parameters_of
from ..store.layout import Layout
from ..store.means import difference_rule
from ..store.parameter_store import arena_bytes, pinned_at
from ..system.processors import num_cores, processor_name
from ..tuning.candidate import Forward, LossForward, Objects, TrialSubject
from ..tuning.fast import Settled, made_up_loss, settle
from .accumulation import Accumulation
from .closures import NOTE_OF_CLOSURES, context_with
from .given import GivenStates
from .gradients import LocalGradients
from .holding import KeptPart
from .loop import TrainingLoop
from .member_state import (
    MemberState,
    adopt,
    extra_states,
    groups_of,
    set_groups,
    settings_text,
)
from .patches import clone_state, leave_state, note_batches, note_losses, sort_out
from .place import LoopPlace
from .schedules import LocalSchedule, Schedules
from .shared_schedule import SharedSchedule
from .source import BatchSource, SourceOptions, source_of
from .step import OptimizerStep, note_of_first_updates, note_of_several
from .unprepared import AnyScheduler, Guard, Strays, StraySchedulers

_NOT_SENT = "not sent"
"""The name under which a checkpoint keeps what compression has not sent yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareOptions:
    """What a script tells ``prepare`` besides its objects.

    Attributes:
        batch: what the loader's batch size means.
        fast: ``auto`` or ``none``; forward: the loop's own (model, batch) -> loss, where known.
        accumulate: batches that an update averages.
        is_sticky: each worker keeps its part of every batch.
        closures: whether optimizers may call the model again inside their steps.
        split: how the model is divided; None: the value of ``--split``.
    """

    batch: str = "global"
    fast: str = "none"
    forward: Forward | None = None
    accumulate: int = 1
    is_sticky: bool = False
    closures: bool = False
    split: str | None = None


class Prepared:
    """The objects of one script, taking part in a run.

    Args:
        objects: what was given to ``prepare``; options: its keyword arguments.

    Attributes:
        model, optimizer: what is stepped here; of several, one that stands for all.
        whole: what the script holds: ``model``, or all of a model that is split.
        source: where its mini-batches come from.
        spread: how the model is split; None: it is not.
    """

    def __init__(
        self,
        exchange: Exchange,
        context: Context,
        objects: tuple[Any, ...],
        device: torch.device,
        keeper: MemberState,
        options: PrepareOptions,
    ) -> None:
        self._exchange, self._member = exchange, exchange.shared
        self._device, self._keeper = device, keeper
        self.models, self.optimizers, loader = sort_out(objects)
        self._options = options
        self._context = context = self._own_context(context, loader)
        self._is_local = context.is_difference or self._member is None
        self.whole = self.model = self._one_model(loader)
        split = self._split(loader)
        self.optimizer: Optimizer = joined(self.optimizers)
        self.source = self._find_source(loader)
        mode, forward = self._trial()
        self._replica: Replica | None = None
        self.spread: SpreadModel | None = None
        if split is not None:
            self.model = self._spread_over(split, forward)
        schedulers = [item for item in objects if isinstance(item, AnyScheduler)]
        self._scaling = self._scale_rates(schedulers)
        self.warmup = self._make_warmup(schedulers)
        self.settled = self._settle(mode, forward)
        self.gradients = self._make_gradients()
        self.loop = self._make_loop()
        self.schedules = self._find_schedules(schedulers if self.warmup is None else [self.warmup])
        self._steps_on_each: StepsOnEach | None = None
        self._set_up_accumulation()
        self.given = GivenStates()
        self._written: WrittenBuffers | None = None
        self.step = OptimizerStep(
            context, self.optimizers, self.gradients, self.loop, self.schedules, self.warmup
        )

    def _own_context(self, context: Context, loader: DataLoader[Any] | None) -> Context:
        """The context that these optimizers need.

        Raises:
            ConfigError: the options do not go together.
        """
        options = self._options
        context = context_with(
            context, self.optimizers, asked=options.closures, has_others=self._member is not None,
            is_split=divides(options.split or context.split),
        )  # fmt: skip
        if options.is_sticky:
            refuse_sticky(loader, context)
        refuse_together(context, options.accumulate, is_sticky=options.is_sticky)
        return context

    def _one_model(self, loader: DataLoader[Any] | None) -> nn.Module:
        """All models as one. ConfigError: something in them is not supported."""
        model = self.models[0] if len(self.models) == 1 else nn.ModuleList(self.models)
        refuse_what_cannot_be_carried(model, self.optimizers)
        if loader is not None and not isinstance(loader.dataset, OfRange):
            refuse_another_device(model, self._device)
        if self._member is not None:  # else nothing is laid out: plain PyTorch
            refuse_without_size(model)
            refuse_shared_memory(model)
        if self._exchange.num_workers > 1:
            refuse_observers(model)
        return model

    def _split(self, loader: DataLoader[Any] | None) -> SplitName | None:
        """How the model is divided; None: each worker has all of it."""
        options = self._options
        name = split_of(options.split, self._context, self._member)
        if name is not None:
            refuse_objects(
                self.models, self.optimizers, loader, self._device,
                accumulate=options.accumulate > 1, sticky=options.is_sticky,
                closures=options.closures, fast=options.fast != "none",
            )  # fmt: skip
        return name

    def _find_source(self, loader: DataLoader[Any] | None) -> BatchSource:
        options, keeper = self._options, self._keeper
        wanted = SourceOptions(
            is_per_worker=options.batch == "per-worker",
            accumulate=options.accumulate,
            is_sticky=options.is_sticky,
            is_alone=self._member is None,  # nothing is drawn: it would be missing in the loop
        )
        source = source_of(loader, self._context, self._device, wanted, keeper.is_kept)
        keeper.drawn = source.order.before
        return source

    def _trial(self) -> tuple[str, Forward | None]:
        """What a speed trial can measure: its mode, and the loop's own (model, batch) -> loss.

        Raises:
            ConfigError: several models were to be compiled, or fused, as one; a stream has no batch
                to try with.
        """
        context, options = self._context, self._options
        is_one = len(self.models) == len(self.optimizers) == 1
        if not is_one and (context.compile != "none" or context.fused_optimizer):
            raise ConfigError(
                "--compile and --fused-optimizer are for one model and one optimizer; with "
                "several, set it in the script: model.compile(), torch.optim.Adam(..., fused=True)"
            )
        can_be_tried = is_one and self.source.numbers is None
        mode, forward = (options.fast, options.forward) if can_be_tried else ("none", None)
        if self.source.is_stream:
            _refuse_speed(context, mode)
        return mode, forward

    def _spread_over(self, name: SplitName, forward: Forward | None) -> nn.Module:
        """The part of the model that is stepped here; ``whole`` stays what the script holds."""
        assert self._member is not None
        self._keeper.load(self.whole, self.optimizer)
        mini_batch = -(-self.source.batch_size // self._context.parts)
        self.spread = spread = spread_over(
            self._member, name, self.whole, self.optimizers, self.source.loader, forward, mini_batch
        )
        self._member.hooks.spread = spread
        return spread.own

    @property
    def steps_apart(self) -> bool:
        """Whether each step of several optimizers is an update."""
        is_apart = self._member is None or self._context.steps_apart
        return len(self.optimizers) > 1 and is_apart

    def _make_warmup(self, schedulers: Sequence[AnyScheduler]) -> Warmup | None:
        factor = self._scaling.factor
        return make_warmup(
            self._context, self.optimizers, schedulers, factor, self._num_steps_an_epoch
        )

    def _make_gradients(self) -> LocalGradients:
        context = self._context
        return LocalGradients(
            self._exchange,
            self.model,
            self.optimizer,
            self._device,
            None if context.precision is None else self.settled.speed.precision,
            is_local=self._is_local,
            is_whole=not (context.averages or context.steps_apart),
        )

    def _make_loop(self) -> TrainingLoop:
        context, speed = self._context, self.settled.speed
        loop = TrainingLoop(
            self._exchange,
            self.source.lease(context.seed, self._device, speed),
            self.gradients,
            speed,
            is_difference=context.is_difference,
        )
        if self._options.is_sticky and self._member is not None:
            loop.beside.append(KeptPart())
        return loop

    def _set_up_accumulation(self) -> None:
        """Set steps of the loop aside until an update has all of its several batches.

        With one batch an update, a script may accumulate by itself, which a warm-up must know.
        """
        parts, source, warmup = self._context.parts, self.source, self._context.warmup
        if self._options.accumulate == 1:
            if self.warmup is not None and warmup and "ep" in warmup:
                self._look_for_steps_on_each(self.warmup, warmup)
            return
        accumulation = Accumulation(
            self._options.accumulate,
            self.optimizers,
            1 if source.is_stream else -(-source.batch_size // parts),
            is_shared=not self._is_local and parts > 1,
        )
        self.loop.accumulation = accumulation
        self.schedules.place.is_held = lambda: accumulation.is_held
        if self._member is None:
            note_losses(lambda _: accumulation.differentiated())
            self.gradients.accumulate(accumulation)

    def _look_for_steps_on_each(self, warmup: Warmup, asked: str) -> None:
        """Watch whether the script steps on each batch: the warm-up was counted in batches."""
        loop, is_alone = self.loop, self._member is None

        def batch() -> object:
            if not loop.is_iterating:
                return None
            return loop.batch if is_alone else loop.holding.current

        steps = StepsOnEach(warmup, asked, parameters_of(self.optimizers[0]), batch)
        self._steps_on_each = steps
        if is_alone:
            note_losses(lambda _: steps.differentiated())

    def _scale_rates(self, schedulers: Sequence[AnyScheduler]) -> RateScaling:
        """Multiply the learning rates as ``--scale-lr`` says.

        Raises:
            ConfigError: it was asked for, and batches have no size, or a changing one.
        """
        context, source = self._context, self.source
        size = source.loader.batch_size
        if context.scale_lr == "none":
            return RateScaling(kind="none", samples=1, own=1)
        if size is None or (context.is_adaptive and not context.is_difference):
            why = "batches of its own" if size is None else f"protocol {context.protocol}"
            raise ConfigError(
                f"--scale-lr {context.scale_lr}: with {why} the number of samples that an update "
                "averages is not fixed; leave it out, and set the rate (--lr, or in the script)"
            )
        if source.numbers is not None:
            size = 1  # a number; an update averages K of them
        is_each = self._options.batch == "per-worker" or source.numbers is not None
        times = context.parts if is_each else 1
        scaling = RateScaling(
            kind=context.scale_lr,
            samples=size * times * self._options.accumulate,
            own=context.own_batch_size or size,
        )
        strays = [
            stray
            for optimizer in self.optimizers
            for stray in StraySchedulers(optimizer, schedulers).found()
        ]
        scale(self.optimizers, [*schedulers, *strays], scaling.factor)
        return scaling

    @property
    def few_samples(self) -> int | None:
        """Samples of the current or the next batch, where they are fewer than the workers."""
        current, member = self.loop.holding.current, self._member
        if member is None or current is None or self.source.is_stream:
            return None
        fewest = member.fewest_samples(current.lease)
        return fewest if fewest < member.num_workers else None

    def _num_steps_an_epoch(self) -> int | None:
        """Optimizer steps in an epoch; None: the data has no length."""
        if self.source.is_stream or self.source.numbers is not None:
            return None
        return self.source.shape.batches().num_batches

    def _find_schedules(self, own: Sequence[AnyScheduler]) -> Schedules:
        exchange, context = self._exchange, self._context
        place = LoopPlace(
            exchange,
            lambda: self.loop.is_iterating,
            is_lockstep=context.is_spmd or context.workers == context.parts == 1,
            is_local=context.is_difference,
            is_newcomer=context.is_newcomer,
        )
        if len(own) > MOST_SCHEDULES:
            raise ConfigError(
                f"prepare() takes at most {MOST_SCHEDULES} schedulers, got {len(own)}; combine "
                "several in one: torch.optim.lr_scheduler.ChainedScheduler"
            )
        tell, is_several = self.tell_settings, exchange.num_workers > 1
        place.leaves_out, place.say_cut = self._leaves_out, self._say_cut
        is_together = context.steps_together
        return Schedules(
            [
                LocalSchedule(each, place, tell, is_one_of_several=is_several and not is_together)
                if self._member is None or place.is_local
                else SharedSchedule(
                    each,
                    place,
                    tell,
                    self._member.rhythm(number),
                    is_apart=self.steps_apart,
                )
                for number, each in enumerate(own)
            ],
            self.optimizers,
            place,
            tell,
            is_alone=self._member is None,
            skips=context.nonfinite == "skip",
            accumulates=self._options.accumulate > 1,
        )

    def _settle(self, mode: str, forward: Forward | None) -> Settled:
        """How this worker computes: as chosen, as measured, or unchanged."""
        context, size, loader = self._context, self.source.batch_size, self.source.loader
        sizes = frozenset({max(1, size // context.parts), -(-size // context.parts)})
        subject = TrialSubject(
            objects=Objects(model=self.model, optimizer=self.optimizer, sizes=sizes),
            device=self._device,
            batch=None,
            num_samples=max(sizes),
            forward=forward or made_up_loss,
            feed=None,
            num_cores=num_cores(),
            num_workers=self._exchange.num_workers,
            steps_itself=self._is_local,
            may_change_numbers=context.precision == "auto",
            loader_workers=loader.num_workers,
            may_load_elsewhere=self._member is not None
            and (loader.num_workers > 0 or isinstance(forward, LossForward)),  # or a task's loop
        )
        return settle(subject, loader, context, mode)

    def attach(self, exchange: StoreExchange) -> None:
        """Join a run of several workers: move the model's memory, replace what must be shared."""
        rule = self.optimizer
        if self._context.is_difference:
            outer = parse_outer(self._context.outer)
            rule = difference_rule(
                self.model.parameters(), lr=outer.lr, momentum=outer.momentum,
                is_nesterov=outer.is_nesterov,
            )  # fmt: skip
        if self.spread is None:
            self._keeper.load(self.model, rule)
        self._remember()
        self._replica = replica = Replica(self.model, self.optimizer, rule)
        if self.spread is not None:
            self.spread.version = lambda: exchange.version
            self.spread.lay_out(replica.layout, exchange.standing)
        self._compress(exchange, replica)
        if self._context.cancels:
            watch_forward(self.model, exchange.check)
            self.loop.modes = Modes(self.model)
        self.loop.leased.seeds_between = exchange.num_workers > 1
        self._answer(exchange, replica)
        exchange.attach(replica, rule, self.source.shape, self._describe(replica))
        if self.spread is not None:
            whole = self.spread.whole
            whole.standing.stands(exchange.version)
        if self._context.fragments > 1 or self._context.overlap:
            self._keeper.add_of_all("own steps", exchange.own_steps, self._go_on_with(exchange))
        clone_state(self.model, self.given)
        self._strays = Strays([*self.model.parameters(), *self.whole.parameters()])
        note_losses(self.note_loss)
        self._watch(exchange, replica)
        if exchange.num_workers > 1:
            self._watch_buffers()
            note_batches(self.note_batch)
            Guard(self.optimizers, exchange.grant, lambda: exchange.is_over).begin()

    @staticmethod
    def _go_on_with(exchange: StoreExchange) -> Callable[[int, Callable[[int], Any]], None]:
        """Return a function that takes over local steps which a checkpoint has not exchanged."""

        def go_on(num_saved: int, read: Callable[[int], Any]) -> None:
            if num_saved == exchange.num_workers:
                exchange.go_on_with(read(exchange.seat))
            elif any(read(number) for number in range(num_saved)):
                exchange.say(
                    f"the checkpoint has {num_saved} workers' local steps that were not exchanged, "
                    f"and this run has {exchange.num_workers} workers: those steps are left out"
                )

        return go_on

    def _compress(self, exchange: StoreExchange, replica: Replica) -> None:
        """Set up the compression of gradients, if it was asked for."""
        compression = parse_compression(self._context.compress)
        if compression is None:
            if self._keeper.has(_NOT_SENT):
                exchange.say(
                    "the run was compressed when its checkpoint was taken: what workers had not "
                    "sent by then is left out"
                )
            return
        exchange.hooks.compressed = compressed = CompressedGradient(
            compression, replica.layout.parameters, exchange.seat, exchange.num_workers,
            replica.device, self._context.fragments,
        )  # fmt: skip
        if self._context.is_newcomer:  # the one it replaces may have sent since the checkpoint
            self._keeper.add(_NOT_SENT, compressed.remember, lambda _: None)
        else:
            self._keeper.add_of_all(_NOT_SENT, compressed.remember, compressed.go_on)

    def _answer(self, exchange: StoreExchange, replica: Replica) -> None:
        """Give the exchange the hooks that it calls on the script's side."""
        hooks = exchange.hooks
        hooks.order_digest = self.loop.leased.order.fingerprint
        hooks.advance_schedule, hooks.marks = self.schedules.advance, self.schedules.marks
        hooks.between = self.schedules.between
        self._watch_rates(exchange)
        if self._context.is_difference:
            hooks.num_own_steps = lambda: self.schedules.place.num_run_steps
        if isinstance(leased := self.loop.leased, StreamedLoader):
            hooks.hear_stream, leased.link = leased.hear, exchange
        if self._context.steps_together:
            hooks.follow = self.step.follow
        hooks.adopt = lambda text: adopt(text, self.optimizer, self.schedules)
        hooks.write_into, hooks.write_own = self._keeper.write_into, self._keeper.write
        hooks.write_kept, hooks.is_held = self._keeper.write_kept, self._keeper.is_held
        hooks.write_layout = partial(self._write_layout, replica.layout)
        if self._context.checkpoints:
            self.loop.entered, self.loop.ended = self._keeper.release, self._keeper.hold

    def _watch_rates(self, exchange: StoreExchange) -> None:
        """Note rates set by hand where workers do not step together, and counts are their own."""
        schedules, place, context = self.schedules, self.schedules.place, self._context
        is_together = place.is_lockstep or place.is_local or exchange.num_workers == 1
        if is_together or self.source.numbers is not None or any(True for _ in schedules):
            return

        def say() -> None:
            if not exchange.has_told_version:
                exchange.say(
                    "a setting of the optimizer (lr, ...) is changed by hand inside the loop, and "
                    f"under {context.protocol} each worker counts only its own steps: a count in "
                    "the script is not the number of updates, which all workers make together; "
                    "use pace.version, or give prepare() a scheduler (LambdaLR)"
                )

        exchange.hooks.hear_settings, schedules.changed_in_the_loop = schedules.hear, say

    def _write_layout(self, layout: Layout, number: int) -> None:
        """Write the layout of the pinned block; of a split model nothing is pinned."""
        if self.spread is None:
            at = pinned_at(layout, self._exchange.num_workers)
            self._keeper.write_layout(number, layout, at)
        else:
            self._keeper.write_tensors(number, self.spread.whole.layout, self.spread.read_place)

    def _whole_layout(self, replica: Replica) -> Layout:
        """The layout of the whole model, as one worker alone has it."""
        return replica.layout if self.spread is None else self.spread.whole.layout

    def _watch(self, exchange: StoreExchange, replica: Replica) -> None:
        """Check that gradients and optimizer state stay as the run expects them."""
        hooks, given = exchange.hooks, self.given
        hooks.check_objects, hooks.check_given = given.check, given.check_all
        if not self._context.is_difference:
            states = SharedStates(
                self.optimizers, exchange.optimizer_state, lambda: exchange.has_opened,
                self._leaves_out,
            )  # fmt: skip

            def check_objects() -> None:
                states.check()
                given.check()

            hooks.take_loaded, hooks.check_objects = states.take_loaded, check_objects
            is_refused = self._context.averages or self._options.accumulate > 1
            self.gradients.watch(replica, is_refused=is_refused)
            if self.spread is not None:
                self.spread.keep_state_dict(self.optimizers)
                self.gradients.own_of = self.spread.own_of
        elif self._context.steps_together:
            self.gradients.watch_here(replica, self.step.own.clip)
        if self._context.is_difference and self._context.resume:
            for optimizer in self.optimizers:
                load = partial(self._load_own, optimizer.load_state_dict)
                optimizer.load_state_dict = load  # type: ignore[method-assign]  # of this optimizer alone
        if self.loop.accumulation is not None:
            self.gradients.accumulate(self.loop.accumulation)

    def _load_own(self, load: Callable[[Any], None], state: Any) -> None:
        """Replaces ``load_state_dict`` of an optimizer that steps here, in a resumed run."""
        if not self._leaves_out():
            load(state)

    def _leaves_out(self) -> bool:
        """Whether what the script loads now is ignored: a resumed run starts as it was saved."""
        member, context = self._member, self._context
        if member is None or member.has_opened or not member.version:
            return False
        if context.resume is None or context.is_newcomer:
            return False
        member.say(
            "the run is resumed from its checkpoint and starts as it was saved: what the script "
            "loads into an optimizer or a scheduler after prepare() is ignored"
        )
        return True

    def _say_cut(self, why: str) -> None:
        """Say why no checkpoint inside an epoch can be resumed from."""
        if self._member is not None and self._context.checkpoints_inside:
            self._member.say(f"no checkpoint inside an epoch can be resumed from: {why}")

    def _watch_buffers(self) -> None:
        """In each pass's first step look for a buffer that is no statistic, until one is found."""
        if self.spread is None:
            self._written, entered = (written := WrittenBuffers(self.whole)), self.loop.entered

            def enter() -> None:
                entered()
                written.note()

            self.loop.entered = enter

    def _remember(self) -> None:
        """Register what a checkpoint keeps of this member besides model and optimizer state."""
        add, optimizer = self._keeper.add, self.optimizer
        if self.source.shape.is_sticky and self._context.resume and self._member is not None:
            self._member.say(
                "the run is resumed from a checkpoint, which has no state that a script "
                "carries from batch to batch: each worker starts its part with a fresh state"
            )
        if self._context.is_difference:
            for number, each in enumerate(self.optimizers):
                name = f"optimizer {number}" if number else "optimizer"
                add(name, each.state_dict, each.load_state_dict)
        for name, module in extra_states(self.whole, is_kept=self._context.checkpoints):
            add(f"extra state of {name}", module.get_extra_state, module.set_extra_state)
        add("groups", lambda: groups_of(optimizer), lambda rows: set_groups(optimizer, rows))
        for number, schedule in enumerate(self.schedules):
            add(f"schedule {number}", schedule.remember, schedule.go_on)
        add(CUT, self.schedules.cut, lambda _: None)
        if self._member is not None:
            self.schedules.keep_strays(self._keep_stray)
        add("steps", self.schedules.place.remember, self.schedules.place.go_on)
        add("scale", self.gradients.scaling.remember, self.gradients.scaling.go_on)
        if self._context.is_newcomer:
            self.gradients.scaling.join()
        if self._member is not None:
            add("skipped", self._member.num_skipped, self._member.begin_skipped)
        add("order", self.loop.leased.order.digest, self.loop.leased.order.expect)
        rng = self.step.injection.delay.rng
        add("delays", rng.getstate, rng.setstate)
        add("random", random_states, restore_random_states)

    def _keep_stray(self, name: str, scheduler: AnyScheduler) -> bool:
        """Keep a scheduler that was not prepared; whether the checkpoint had it."""
        if not can_be_packed(scheduler.state_dict()):
            return False
        was_kept = self._keeper.has(name)
        self._keeper.add(name, scheduler.state_dict, scheduler.load_state_dict)
        return was_kept

    def _describe(self, replica: Replica) -> dict[str, object]:
        layout, context = self._whole_layout(replica), self._context
        compressed = None if self._member is None else self._member.hooks.compressed
        pins = context.checkpoints and self.spread is None
        if context.checkpoints and (unsupported := unwritable(layout.rows())):
            raise ConfigError(
                f"a checkpoint cannot hold {unsupported[0]!r}, which is of {unsupported[1]}: "
                "safetensors has no such type; to train without: --checkpoint-every never"
            )
        return {
            **self._loop_words(),
            "digest": f"{layout.digest()}-{self.source.shape}",
            "task": context.name,
            "source": context.source,
            "program": context.program,
            "threads": torch.get_num_threads(),
            "device": str(self._device),
            "machine": processor_name(self._device),
            "num_parameters": layout.num_parameters,
            "update_bytes": Fragments(layout.parameters, context.fragments).largest_bytes,
            "arena_bytes": arena_bytes(replica.layout, self._exchange.num_workers, pins=pins),
            "pinned_bytes": layout.block_bytes if pins else 0,
            "checkpoint_bytes": layout.block_bytes,
            "epochs": context.epochs or 0,
            "grain": grain(self.model) if context.cancels else "none needed",
            "can_share": self._device.type == "cpu" or context.path == "collective",
            "notes": self._notes(),
            "could_try": [] if self.source.is_stream else list(self.settled.could_try),
            "rounding": list(self.settled.rounding),
            "steps_together": context.steps_together,
            "parameter_table": parameter_table(self.whole) if context.parameters else [],
            "split": "" if self.spread is None else self.spread.note,
            "split_bytes": 0 if self.spread is None else self.spread.sent_bytes,
            "compression": None if compressed is None else asdict(self._price(compressed)),
        }

    def _price(self, compressed: CompressedGradient) -> CompressionPrice:
        """The cost of compressing here, and what it saves."""
        assert self._member is not None
        price = self._member.price
        return price_alone(compressed) if price is None else price(compressed)

    def _loop_words(self) -> dict[str, object]:
        """Fields of the description: what the loop goes over, and steps with."""
        leased, shape = self.loop.leased, self.source.shape
        return {
            "num_samples": shape.num_samples,
            "batch_size": shape.batch_size,
            "drop_last": not shape.keep_remainder,
            "has_own_batches": leased.order.has_own_batches,
            "order": self._order_kind,
            "num_loading": 0 if self.source.numbers is not None else leased.num_loading,
            "lookahead": 0 if self.source.is_stream else self.loop.lookahead,
            "learning_rates": [
                float(rate)
                for group in self.optimizer.param_groups
                if (rate := group.get("lr")) is not None
            ],
            "samples": sample_digests(leased.loader) if self._context.workers > 1 else [],
            "num_optimizers": len(self.optimizers),
            "samples_each": leased.samples_each,
            "accumulate": self._options.accumulate,
            "is_sticky": shape.is_sticky,
        }

    @property
    def _order_kind(self) -> str:
        if self.source.is_stream:
            return "stream"
        return self.loop.leased.order.kind if self.source.numbers is None else "numbers"

    def _notes(self) -> list[str]:
        context, parts = self._context, self._context.parts
        notes = [*context.notes, *self.settled.notes, *self._notes_of_rates()]
        notes += batch_norm_note(self.whole, self.source.batch_size, parts)
        notes += self.source.notes
        if context.steps_together:
            notes.append(NOTE_OF_CLOSURES)
        elif len(self.optimizers) > 1:
            notes.append(note_of_several(len(self.optimizers), context))
        if context.num_as_full_sync:
            notes += note_of_first_updates(self.optimizers, context)
        averages = context.averages or context.steps_together or self._options.accumulate > 1
        if averages and self.spread is None:
            notes += gradient_hooks_note(self.model)
        if isinstance(self.loop.leased, StreamedLoader):
            notes += self.loop.leased.notes()
        if self.source.shape.is_sticky:
            notes += sticky_notes(context)
        if isinstance(data := self.loop.leased.dataset, OfRange):
            notes.append(note_of_range(data.numbers, parts))
        return notes if self.source.numbers is None else [*notes, note(parts)]

    def _notes_of_rates(self) -> list[str]:
        notes = []
        if self._scaling.kind != "none":
            group = self.optimizers[0].param_groups[0]
            rate = group["lr"] if self.warmup is None else self.warmup.base_lrs[0]
            is_script = self._context.own_batch_size is None
            notes.append(self._scaling.note(float(rate), is_script=is_script))
        if self.warmup is not None:
            notes.append(note_of_warmup(self.warmup, self._context))
        return notes

    def release(self) -> None:
        """End the trial: models are plain ones with their trained weights, loaders the user's."""
        self.loop.is_released = True
        self.loop.leased.close()
        if self._replica is not None:
            self._replica.release()
        leave_state(self.model)
        unwatch_forward(self.model)

    def tell_settings(self) -> None:
        """Tell the run learning rates and schedules, for a worker that may join later."""
        if self._context.respawn and self._member is not None and self.schedules.knows:
            self._member.tell_settings(settings_text(self.optimizer, self.schedules))

    # -- what happens in the loop ---------------------------------------------------------------

    def note_loss(self, loss: Tensor) -> None:
        """Record a backward pass; a loss of one number is what the next push reports."""
        if loss.numel() == 1:
            self.gradients.loss = loss.detach()
        self._strays.look(loss)
        if self._steps_on_each is not None:
            self._steps_on_each.differentiated()
        if self._written is not None:
            self._say_of_buffers(self._written)
        self.loop.differentiated()

    def _say_of_buffers(self, written: WrittenBuffers) -> None:
        late, name = written.late(), written.written()
        if late is None and name is None:
            return
        assert self._member is not None
        if late is not None:
            self._member.say(late_buffer_note(late))
        if name is not None:
            self._member.say(own_buffer_note(name))
        self._written = None

    def note_batch(self, dataset: object) -> None:
        """Note a batch of a loader over ``dataset`` that trains inside the loop."""
        is_in_loop = self.loop.is_iterating and not self.loop.num_nested and torch.is_grad_enabled()
        is_training = any(model.training for model in self.models)
        if not is_in_loop or not is_training or isinstance(dataset, SeededData):
            return
        assert self._member is not None
        number = f"{len(dataset)} samples" if isinstance(dataset, Sized) else "no known size"
        self._member.say(
            f"a second DataLoader, of {number}, is used inside the loop and was not prepared: "
            "every worker goes through all of it; to share it out: other = pace.prepare(other), "
            "after the first prepare()"
        )
        note_batches(lambda _: None)

    def explain(self, error: Exception) -> None:
        """Add a note to a failed step's error, if sharing among workers may be the cause.

        For an error about sizes it is the batch, in the first step; for a resized storage a buffer.
        """
        text = str(error)
        if self._replica is not None and "resize storage" in text:
            error.add_note(RESIZE_BEFORE)
        size, parts = self.loop.leased.loader.batch_size, self._context.parts
        is_shared = size == self.source.batch_size and parts > 1
        is_first = self.schedules.place.num_run_steps == 0
        if is_shared and is_first and re.search("(?<!re)size|shape|dimension|length", text):
            error.add_note(
                f"a batch of {size} is shared by {parts} mini-batches; if the script expects "
                f"{size} samples in each: pace.prepare(..., batch='per-worker')"
            )


def refuse_together(context: Context, accumulate: int, *, is_sticky: bool) -> None:
    """Raise ConfigError where a joint step of all workers is not possible."""
    if context.steps_together and (accumulate > 1 or is_sticky):
        what = "prepare(sticky=True)" if is_sticky else f"accumulate {accumulate}"
        raise ConfigError(
            f"{what} with a step that all workers make together (LBFGS, closures, hooks) is not "
            "supported; leave it out, or use --protocol local-sgd:1"
        )


def refuse_sticky(loader: DataLoader[Any] | None, context: Context) -> None:
    """Raise ConfigError where no worker could keep its part of every batch."""
    if loader is None or isinstance(loader.dataset, IterableDataset):
        what = "a loader, which has batches" if loader is None else "a map-style data set"
        raise ConfigError(
            f"prepare(sticky=True) needs {what}: a worker keeps the same places of every batch"
        )
    if context.workers > 1 and not context.is_spmd:
        raise ConfigError(
            f"prepare(sticky=True) under {context.protocol}: any free worker takes the next "
            "mini-batch, so the script's state would meet another part of the batch; "
            "use --protocol full-sync or local-sgd:H"
        )


def refuse_apart(context: Context, *, is_asked: bool) -> None:
    """Raise ConfigError where workers do not step together: prepare(together=True)."""
    if is_asked and context.workers > 1 and not context.is_spmd:
        raise ConfigError(
            f"prepare(together=True) under {context.protocol}: any free worker takes what comes "
            "next, but this script relies on workers that step together (a rate set by hand for "
            "each step, a scheduler after some steps, a state carried from turn to turn); use "
            "--protocol full-sync or local-sgd:H"
        )


def sticky_notes(context: Context) -> list[str]:
    """Notes for the plan on parts that stay with their worker."""
    notes = [
        "each worker keeps its part of every batch, in order, so that it can carry a state; if a "
        "worker dies, its state is lost and the run ends (--respawn: it resumes from a checkpoint)"
    ]
    if context.is_difference:
        notes.append(
            f"each worker's {context.num_steps} steps between two averages are on its part of as "
            f"many batches in a row: a step has 1/{context.parts} of a batch"
        )
    return notes


def _refuse_speed(context: Context, fast: str) -> None:
    """Raise ConfigError for options that speed up a worker, but not over a stream."""
    if context.loader_workers is not None:
        raise ConfigError(
            f"--loader-workers {context.loader_workers}: the number of readers of a stream is set "
            "by its DataLoader (num_workers), since its data set shares itself out among them"
        )
    if fast == "auto":
        raise ConfigError(
            "--fast auto takes a batch to measure with, and a batch taken from a stream is gone: "
            "choose by hand (--compile default, --channels-last, --fused-optimizer, --threads)"
        )
