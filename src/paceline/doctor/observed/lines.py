"""What was observed, in lines: the verdict, the budget of a step, what is worth it, what is not.

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
_TOLD = 0.02
"""Waits of less are not spoken of."""


def render_observation(script: str, seen: Observation) -> Iterator[str]:
    """The verdict first."""
    yield f"{script}: {verdict(seen)}"
    yield ""
    yield from _budget(seen)
    yield from _worth(seen)
    yield from _mathematics(seen)
    yield from _rejected(seen)
    if seen.ended:
        yield ""
        yield f"{seen.ended}; what is above was measured until then"


def verdict(seen: Observation) -> str:
    """One sentence: what binds it, and what can be gained."""
    shares = {
        Regime.INPUT: f"{seen.share(INPUT):.0%} of a step waits for batches",
        Regime.COMMUNICATION: f"{seen.share(EXCHANGE):.0%} of a step is spent in collectives",
        Regime.WAITS: f"{seen.share(WAITS, PRINTS):.0%} of a step waits for numbers or prints",
        Regime.COMPUTE: "most of a step is spent in matrix products and convolutions",
        Regime.BANDWIDTH: "most of a step is spent in operations that move memory",
        Regime.OVERHEAD: f"most of a step is spent in beginning operations and in Python "
        f"({seen.num_operations:.0f} operations)",
    }  # fmt: skip
    said = f"{seen.regime.value} bound: {shares[seen.regime]}"
    kept = _kept(seen)
    if seen.together is not None and seen.together.outcome is PriceOutcome.WORTH:
        return f"{said}; {len(kept)} fixes together save {_percent(seen.together)}"
    if kept:
        return f"{said}; {kept[0].name} saves {_percent(kept[0])}"
    return f"{said}; nothing to gain was found" if seen.prices else said


def _kept(seen: Observation) -> list[Price]:
    return [one for one in seen.prices if one.outcome is PriceOutcome.WORTH and not one.changes]


def _budget(seen: Observation) -> Iterator[str]:
    yield (
        f"a step takes {_ms(seen.step_s)}; {seen.num_steps} were observed on {seen.device}, "
        f"{seen.slow_down:.2f} times as slow for it:"
    )
    for part in PARTS:
        seconds = seen.parts.get(part, 0.0)
        if seconds:
            yield f"  {part:<22}{_ms(seconds):>12}{seconds / seen.observed_s:>8.1%}"
    yield f"  {'an observed step':<22}{_ms(seen.observed_s):>12}{1:>8.1%}"
    computing_s = sum(seen.parts.get(one, 0.0) for one in COMPUTING)
    if computing_s and BACKWARD in seen.parts and seen.num_operations:
        yield (
            f"{', '.join(COMPUTING[:-1])} and {COMPUTING[-1]}: "
            f"{seen.arithmetic_s / computing_s:.0%} matrix products and convolutions, "
            f"{seen.bandwidth_s / computing_s:.0%} moving memory, "
            f"{seen.overhead_s / computing_s:.0%} beginning operations, and Python"
        )
    if seen.op_per_s and seen.most_op_per_s:
        yield (
            f"matrix products and convolutions reach {seen.op_per_s / 1e9:.3g} GFLOP/s, "
            f"{seen.op_per_s / seen.most_op_per_s:.0%} of what products of matrices in fp32 reach "
            f"here ({seen.most_from})"
        )
    if seen.share(WAITS, PRINTS) > _TOLD:
        yield from waiting_lines(seen)
    if seen.input_saved is not None and seen.input_saved > _TOLD:
        yield f"with batches that cost nothing it would take {seen.input_saved:.0%} less"


def _worth(seen: Observation) -> Iterator[str]:
    kept = _kept(seen)
    if not kept:
        return
    yield ""
    yield "worth it here, each beside those before it:"
    for one in kept:
        yield f"  {_where(one)}{one.fix}"
        yield f"      saves {_interval(one)}"
    if seen.together is not None:
        yield f"  all together: {_interval(seen.together)}"


def _mathematics(seen: Observation) -> Iterator[str]:
    found = [one for one in seen.prices if one.changes and one.outcome is PriceOutcome.WORTH]
    if found:
        yield ""
        yield "changes the mathematics, so that it is yours to decide:"
    for one in found:
        yield f"  {_where(one)}{one.fix}"
        yield f"      saves {_interval(one)}"


def _rejected(seen: Observation) -> Iterator[str]:
    others = [one for one in seen.prices if one.outcome is not PriceOutcome.WORTH]
    if not others:
        return
    tried = [one for one in seen.prices if one.pairs]
    nothing = [one for one in tried if one.outcome is PriceOutcome.NOTHING]
    counts = {
        "inside the noise or under 2 %": sum(one.high >= 0 for one in nothing),
        "slower": sum(one.high < 0 for one in nothing),
        "not to be told from noise": sum(one.outcome is PriceOutcome.UNKNOWN for one in tried),
    }
    told = [f"{number} {what}" for what, number in counts.items() if number]
    yield ""
    yield f"{', '.join([f'{len(tried)} tried', *told])}; not suggested:"
    for one in others:
        is_told = one.outcome is PriceOutcome.NOTHING
        reason = one.reason or (_interval(one) if is_told else f"cannot be told: {_interval(one)}")
        yield from textwrap.wrap(
            f"{one.name}: {reason}", _WIDTH, initial_indent="  ", subsequent_indent="      "
        )


def _where(one: Price) -> str:
    return f"{short(one.file)}:{one.line}  " if one.line else ""


def short(file: str) -> str:
    """A path as one would write it here."""
    try:
        return str(Path(file).resolve().relative_to(Path.cwd()))
    except ValueError:
        return file


def _interval(one: Price) -> str:
    low = max(one.low, -9.99)
    return f"{one.saved:.1%} of a step (95 %: {low:.1%} to {one.high:.1%}, {one.pairs} pairs)"


def _percent(one: Price) -> str:
    return f"{one.saved:.0%} of a step"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms" if seconds < 0.01 else f"{seconds * 1e3:.1f} ms"


def waiting_lines(seen: Observation) -> Sequence[str]:
    """Places that wait for numbers or print, and what they take."""
    return [
        f"{short(one.file)}:{one.line}  {one.what}: {one.per_step:.2g} a step, {_ms(one.seconds)}"
        for one in sorted(seen.waits, key=lambda one: (one.file, one.line))
    ]
