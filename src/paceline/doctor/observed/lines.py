"""Render an observation as lines: the verdict, a step's budget, which fixes are worth it or not.

This module must not know how anything was measured.
"""

import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from .observation import (
    BACKWARD,
    COMPUTING,
    EXCHANGE,
    INPUT,
    PARTS,
    PRINTS,
    WAITS,
    Observation,
    Price,
    PriceOutcome,
    Regime,
)

_WIDTH = 100
_MENTIONED = 0.02
"""Share of a step; smaller waits and savings are not mentioned."""


def render_observation(script: str, observation: Observation) -> Iterator[str]:
    """Yield the lines of an observation, the verdict first."""
    yield f"{script}: {verdict(observation)}"
    yield ""
    yield from _budget(observation)
    yield from _worth(observation)
    yield from _mathematics(observation)
    yield from _rejected(observation)
    if observation.ended:
        yield ""
        yield f"{observation.ended}; the above was measured until then"


def verdict(observation: Observation) -> str:
    """Return one sentence: what bounds the step, and what can be gained."""
    shares = {
        Regime.INPUT: f"{observation.share(INPUT):.0%} of a step waits for batches",
        Regime.COMMUNICATION: f"{observation.share(EXCHANGE):.0%} of a step is spent in collectives",
        Regime.WAITS: f"{observation.share(WAITS, PRINTS):.0%} of a step waits for numbers or prints",
        Regime.COMPUTE: "most of a step is spent in matrix products and convolutions",
        Regime.BANDWIDTH: "most of a step is spent in operations that move memory",
        Regime.OVERHEAD: f"most of a step is spent in launching operations and in Python "
        f"({observation.num_operations:.0f} operations)",
    }  # fmt: skip
    sentence = f"{observation.regime.value} bound: {shares[observation.regime]}"
    kept = _kept_fixes(observation)
    if observation.together is not None and observation.together.outcome is PriceOutcome.WORTH:
        return f"{sentence}; {len(kept)} fixes together save {_percent(observation.together)}"
    if kept:
        return f"{sentence}; {kept[0].name} saves {_percent(kept[0])}"
    return f"{sentence}; no fix that helps was found" if observation.prices else sentence


def _kept_fixes(observation: Observation) -> list[Price]:
    """Return the prices of fixes that are worth it and leave the mathematics as it is."""
    return [
        price
        for price in observation.prices
        if price.outcome is PriceOutcome.WORTH and not price.changes
    ]


def _budget(observation: Observation) -> Iterator[str]:
    yield (
        f"a step takes {_ms(observation.step_s)}; {observation.num_steps} were observed on {observation.device}, "
        f"{observation.slow_down:.2f} times as slow because of it:"
    )
    for part in PARTS:
        seconds = observation.parts.get(part, 0.0)
        if seconds:
            yield f"  {part:<22}{_ms(seconds):>12}{seconds / observation.observed_s:>8.1%}"
    yield f"  {'an observed step':<22}{_ms(observation.observed_s):>12}{1:>8.1%}"
    computing_s = sum(observation.parts.get(part, 0.0) for part in COMPUTING)
    if computing_s and BACKWARD in observation.parts and observation.num_operations:
        yield (
            f"{', '.join(COMPUTING[:-1])} and {COMPUTING[-1]}: "
            f"{observation.arithmetic_s / computing_s:.0%} matrix products and convolutions, "
            f"{observation.bandwidth_s / computing_s:.0%} moving memory, "
            f"{observation.overhead_s / computing_s:.0%} launching operations, and Python"
        )
    if observation.op_per_s and observation.most_op_per_s:
        yield (
            f"matrix products and convolutions reach {observation.op_per_s / 1e9:.3g} GFLOP/s, "
            f"{observation.op_per_s / observation.most_op_per_s:.0%} of what products of matrices in fp32 reach "
            f"here ({observation.most_from})"
        )
    if observation.share(WAITS, PRINTS) > _MENTIONED:
        yield from waiting_lines(observation)
    if observation.input_saved is not None and observation.input_saved > _MENTIONED:
        yield f"if batches took no time a step would take {observation.input_saved:.0%} less"


def _worth(observation: Observation) -> Iterator[str]:
    kept = _kept_fixes(observation)
    if not kept:
        return
    yield ""
    yield "worth it here, each in addition to those before it:"
    for price in kept:
        yield f"  {_where(price)}{price.fix}"
        yield f"      saves {_interval(price)}"
    if observation.together is not None:
        yield f"  all together: {_interval(observation.together)}"


def _mathematics(observation: Observation) -> Iterator[str]:
    prices = [
        price
        for price in observation.prices
        if price.changes and price.outcome is PriceOutcome.WORTH
    ]
    if prices:
        yield ""
        yield "changes the mathematics, so you decide:"
    for price in prices:
        yield f"  {_where(price)}{price.fix}"
        yield f"      saves {_interval(price)}"


def _rejected(observation: Observation) -> Iterator[str]:
    others = [price for price in observation.prices if price.outcome is not PriceOutcome.WORTH]
    if not others:
        return
    tried = [price for price in observation.prices if price.pairs]
    nothing = [price for price in tried if price.outcome is PriceOutcome.NOTHING]
    counts = {
        "inside the noise or under 2 %": sum(price.high >= 0 for price in nothing),
        "slower": sum(price.high < 0 for price in nothing),
        "not distinguishable from noise": sum(
            price.outcome is PriceOutcome.UNKNOWN for price in tried
        ),
    }
    parts = [f"{number} {what}" for what, number in counts.items() if number]
    yield ""
    yield f"{', '.join([f'{len(tried)} tried', *parts])}; not suggested:"
    for price in others:
        is_clear = price.outcome is PriceOutcome.NOTHING
        interval = _interval(price) if is_clear else f"not distinguishable: {_interval(price)}"
        reason = price.reason or interval
        yield from textwrap.wrap(
            f"{price.name}: {reason}", _WIDTH, initial_indent="  ", subsequent_indent="      "
        )


def _where(price: Price) -> str:
    return f"{short(price.file)}:{price.line}  " if price.line else ""


def short(file: str) -> str:
    """Return a path relative to the current folder, or unchanged if it is outside."""
    try:
        return str(Path(file).resolve().relative_to(Path.cwd()))
    except ValueError:
        return file


def _interval(price: Price) -> str:
    low = max(price.low, -9.99)
    return f"{price.saved:.1%} of a step (95 %: {low:.1%} to {price.high:.1%}, {price.pairs} pairs)"


def _percent(price: Price) -> str:
    return f"{price.saved:.0%} of a step"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms" if seconds < 0.01 else f"{seconds * 1e3:.1f} ms"


def waiting_lines(observation: Observation) -> Sequence[str]:
    """Return one line per place that waits for numbers or prints, with what it takes."""
    return [
        f"{short(wait.file)}:{wait.line}  {wait.what}: {wait.per_step:.2g} a step, "
        f"{_ms(wait.seconds)}"
        for wait in sorted(observation.waits, key=lambda wait: (wait.file, wait.line))
    ]
