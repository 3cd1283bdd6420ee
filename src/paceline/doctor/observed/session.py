"""Measure a script step by step, written as one sequence.

    warm up | plain steps | observed steps | profiled steps | A B | B A | ... for each fix | end

`Session.run` is a generator: it is resumed whenever a step of the script has ended, and each
``yield`` lets the script make one more. Results are written after each stage, so that nothing is
lost if the script ends early. Above 300 lines, so that the whole sequence is in one place. This
module must not know how a script is started.
"""

import statistics
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from time import perf_counter, thread_time
from typing import Any, TypeAlias, TypeVar

import torch
from torch.optim.lr_scheduler import LRScheduler

from ...machine.ceilings import read_matmul
from .feed import WatchedFeed
from .hooks import Hooks, synchronize
from .knob import Knob
from .knobs import OptimizerFlags, Setting, is_hopeless, knobs_for
from .observation import COMPUTING, REST, Observation, Price, PriceOutcome, Wait
from .operations import Operations, profiled
from .pairs import Pairs
from .patches import Patches

_WARM, _PLAIN, _OBSERVED, _PROFILED = 4, 8, 16, 2
_SLOW_S = 1.0
"""If a step takes longer, a third as many are measured."""
_BLOCK_S = 0.15
_MOST_BLOCK = 400
_SHARE = 0.34
"""The share of the remaining time that one fix may take."""

T = TypeVar("T")
Steps: TypeAlias = Generator[None, None, T]
"""A generator that lets the script make one step at each ``yield``, and then returns a value."""


class Session:
    """The measurements of one run of a script.

    Args:
        price_s: seconds for pricing fixes; 0: none is tried.
        only: only fixes whose name begins with this are tried; empty: all are.
        report: called with the results so far after each stage.
        stepped: called at each step.

    Attributes:
        feed: the batches of the script's loaders.
        hooks: the hooks into its steps.
        is_done: whether everything is measured.
        tried: the name of the fix that is being tried; empty if none is.
    """

    def __init__(
        self, price_s: float, only: str, report: Callable[[Observation], None],
        stepped: Callable[[], None],
    ) -> None:  # fmt: skip
        self.feed = WatchedFeed()
        self.hooks = Hooks(self._on_step)
        self.feed.waited = self._waited
        self.is_done, self.tried = False, ""
        self._price_s, self._only, self._report, self._stepped = price_s, only, report, stepped
        self._fetch_s = self._fetch_cpu_s = self._since_s = self._since_cpu_s = 0.0
        self._run = self.run()
        self._is_median = False

    def _on_step(self) -> None:
        self.feed.step_done()
        self._stepped()
        try:
            next(self._run)
        except StopIteration:
            self.is_done = True
        if self.is_done:
            raise Finished

    def _waited(self, begins: bool) -> None:
        self.hooks.waited(begins)
        if self.hooks.is_observing:
            sign = -1 if begins else 1
            self._fetch_s += sign * perf_counter()
            self._fetch_cpu_s += sign * thread_time()

    def run(self) -> Steps[None]:
        """Measure everything, one step of the script at each ``yield``."""
        for _ in range(_WARM):
            yield
        before = yield from self._timed(2)
        divisor = 3 if max(before) > _SLOW_S else 1
        plain = yield from self._timed(max(2, _PLAIN // divisor))
        observation = yield from self._observed(_OBSERVED // divisor, statistics.median(plain))
        after = yield from self._timed(max(2, _PLAIN // divisor))
        observation = replace(observation, step_s=statistics.median([*plain, *after]))
        self._report(observation)
        operations = yield from self._profiled()
        observation = _divided(observation, operations)
        self._report(observation)
        if self._price_s:
            yield from self._priced(observation)

    def _timed(self, count: int) -> Steps[list[float]]:
        """Return the seconds of each of ``count`` steps."""
        synchronize()
        seconds = []
        last_s = perf_counter()
        for _ in range(count):
            yield
            synchronize()
            now_s = perf_counter()
            seconds.append(now_s - last_s)
            last_s = now_s
        return seconds

    def _observed(self, count: int, step_s: float) -> Steps[Observation]:
        """Time the parts of ``count`` steps."""
        self.hooks.observe()
        yield  # a step that is not measured: hooks have a first-time cost
        self.hooks.taken()
        self.hooks.waits.clear()
        self._fetch_s = self._fetch_cpu_s = 0.0
        sums: dict[str, float] = defaultdict(float)
        start_s = perf_counter()
        for _ in range(count):
            yield
            for part, seconds in self.hooks.taken().items():
                sums[part] += seconds / count
        observed_s = (perf_counter() - start_s) / count
        self.hooks.leave()
        sums[REST] = max(0.0, observed_s - sum(sums.values()))
        waits = tuple(
            Wait(file=place.file, line=place.line, what=what, per_step=times / count,
                 seconds=seconds / count)
            for (place, what), (times, seconds) in self.hooks.waits.items()
        )  # fmt: skip
        return Observation(
            step_s=step_s, observed_s=observed_s, parts=dict(sums), num_steps=count,
            device=_device(self.hooks), waits=waits,
        )  # fmt: skip

    def _profiled(self) -> Steps[Operations | None]:
        """Profile the operations of a few steps; None if the script's own profiler is running."""
        try:
            profiler: Any = torch.profiler.profile(profile_memory=True, with_flops=True)
            profiler.start()
        except Exception:  # the script runs a profiler of its own
            return None
        for _ in range(_PROFILED):
            yield
        synchronize()
        profiler.stop()
        return profiled(profiler, _PROFILED)

    # -- prices ---------------------------------------------------------------------------------

    def _priced(self, observation: Observation) -> Steps[None]:
        """Price every fix, and keep those that are worth it for the fixes after them."""
        self._end_s = perf_counter() + self._price_s
        # a schedule may end, and the epoch goes on without end from here
        Patches().wrap(LRScheduler, "step", lambda step: lambda *args, **kwargs: None)
        self.feed.is_endless, self._is_median = True, self.feed.loader is None
        cpu = self._fetch_cpu_s / self._fetch_s if self._fetch_s > 0 else 1.0
        knobs = knobs_for(
            self.hooks, self.feed, lambda *parts: self._share(observation, *parts), cpu,
            on_cpu=observation.device == "cpu",
        )  # fmt: skip
        self._step_s = observation.step_s
        prices: list[Price] = []
        kept: list[Knob] = []
        if self.feed.loader is not None:
            cached = Setting("cached", "", self._cache(True), self._cache(False))
            price = yield from self._price(cached, ())
            observation = replace(observation, input_saved=price.saved if price.pairs else None)
        for knob in knobs:
            if not knob.name.startswith(self._only):
                continue
            price = yield from self._price(knob, kept)
            prices.append(price)
            if price.outcome is PriceOutcome.WORTH and not knob.changes:
                knob.turn(True)
                kept.append(knob)
                self._step_s *= 1.0 - price.saved
            else:
                knob.close()
            self._report(replace(observation, prices=tuple(prices)))
        if len(kept) > 1:
            together = yield from self._together(kept)
            self._report(replace(observation, prices=tuple(prices), together=together))
        for knob in kept:
            knob.turn(False)
            knob.close()

    def _share(self, observation: Observation, *parts: str) -> float:
        """Return the share of a step that parts take, with the fixes kept so far."""
        return min(1.0, sum(observation.parts.get(part, 0.0) for part in parts) / self._step_s)

    def _cache(self, is_on: bool) -> Callable[[], None]:
        def turn() -> None:
            self.feed.is_cached = is_on

        return turn

    def _price(self, knob: Knob, kept: Sequence[Knob]) -> Steps[Price]:
        """Measure one fix beside those that are kept, unless it cannot be worth it."""
        base = Price(
            name=knob.name, fix=knob.fix, outcome=PriceOutcome.NOT_TRIED, changes=knob.changes,
            file=knob.place.file, line=knob.place.line,
            words=tuple((name, str(value)) for name, value in knob.words.items()),
            beside=tuple(other.name for other in kept),
        )  # fmt: skip
        if is_hopeless(knob):
            reason = f"it could save {knob.bound:.1%} of a step at most"
            return replace(base, outcome=PriceOutcome.NOTHING, reason=reason)
        for other in kept:
            if is_same_kind(knob, other):
                return replace(base, reason=f"{other.name} is worth it, and sets the same thing")
        left_s = self._end_s - perf_counter()
        if left_s < 2 * (max(knob.settle, knob.settle_off) + 2) * self._step_s:
            return replace(base, reason="no time was left")
        pairs, self.tried = Pairs(), knob.name
        try:
            yield from self._compare([knob], pairs, left_s * _SHARE)
        except Exception as error:  # a fix may fail in any way in the script
            return replace(base, reason=f"it does not work here: {_line(error)}")
        finally:
            self.tried = ""
        if knob.failed:
            return replace(base, reason=f"it does not work here: {knob.failed}")
        return _with_result(base, pairs)

    def _together(self, kept: Sequence[Knob]) -> Steps[Price]:
        """Measure all kept fixes together, and leave them on."""
        pairs = Pairs()
        yield from self._compare(kept, pairs, max(5.0, self._end_s - perf_counter()))
        for knob in kept:
            knob.turn(True)
        names = " + ".join(knob.name for knob in kept)
        return _with_result(Price(name=names, fix="", outcome=PriceOutcome.UNKNOWN), pairs)

    def _compare(self, knobs: Sequence[Knob], pairs: Pairs, limit_s: float) -> Steps[None]:
        """Add pairs of blocks until the outcome is clear or time is over; leave the fixes off."""
        stride = max(knob.stride for knob in knobs)
        settle = {
            True: max(knob.settle for knob in knobs), False: max(knob.settle_off for knob in knobs)
        }  # fmt: skip
        per_block = min(_MOST_BLOCK, max(1, round(_BLOCK_S / max(self._step_s, 1e-5))))
        per_block = max(stride, per_block // stride * stride)
        start_s, is_first = perf_counter(), True
        try:
            while not pairs.is_done():
                if len(pairs) >= 2 and perf_counter() - start_s > limit_s:
                    break
                seconds = {}
                for is_on in (False, True) if len(pairs) % 2 else (True, False):
                    for knob in knobs:
                        knob.turn(is_on)
                    for _ in range(settle[is_on] + 2 * is_first):
                        yield
                    if any(knob.failed for knob in knobs):
                        return
                    is_first = False
                    times = yield from self._timed(per_block)
                    seconds[is_on] = (statistics.median if self._is_median else statistics.fmean)(
                        times
                    )
                pairs.add(seconds[False], seconds[True])
        finally:
            for knob in knobs:
                knob.turn(False)


class Finished(BaseException):
    """Ends the script when all is known; its ``except Exception`` does not catch this."""


def is_same_kind(knob: Knob, other: Knob) -> bool:
    """Whether two fixes set the same thing."""
    return knob.fix.partition("(")[0] == other.fix.partition("(")[0] or (
        isinstance(knob, OptimizerFlags) and isinstance(other, OptimizerFlags)
    )


def _with_result(price: Price, pairs: Pairs) -> Price:
    """Return a price with what its pairs have measured."""
    saved = pairs.saved()
    return replace(
        price, outcome=pairs.outcome(), saved=saved.middle, low=saved.low, high=saved.high,
        pairs=len(pairs),
    )  # fmt: skip


def _divided(observation: Observation, operations: Operations | None) -> Observation:
    """Return an observation with the seconds of its computing parts divided by what bounds them."""
    computing_s = sum(observation.parts.get(part, 0.0) for part in COMPUTING)
    if operations is None:
        return replace(observation, overhead_s=computing_s)
    busy_s = operations.arithmetic_s + operations.bandwidth_s
    scale = min(1.0, computing_s / busy_s) if busy_s else 0.0
    arithmetic_s, bandwidth_s = operations.arithmetic_s * scale, operations.bandwidth_s * scale
    most_op_per_s, source = read_matmul(observation.device, "fp32", torch.get_num_threads())
    return replace(
        observation, arithmetic_s=arithmetic_s, bandwidth_s=bandwidth_s,
        overhead_s=max(0.0, computing_s - arithmetic_s - bandwidth_s),  # a difference may round
        num_operations=operations.number, allocated_bytes=operations.allocated_bytes,
        op_per_s=operations.op_per_s, most_op_per_s=most_op_per_s, most_from=source,
    )  # fmt: skip


def _device(hooks: Hooks) -> str:
    groups = hooks.optimizer.param_groups if hooks.optimizer is not None else []
    return next((parameter.device.type for group in groups for parameter in group["params"]), "cpu")


def _line(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}"[:120]
