"""What queueing saves, as lines of plain text; this module must not know how it was measured."""

from collections.abc import Mapping

from .asynchrony import Asynchrony
from .lines import duration, quartiles, table
from .samples import Timing

_CLOSE = 0.1
"""How near to what was measured a prediction is on a quiet machine."""
_PARTS = (
    ("t1", "front end: until the back end begins"),
    ("t2", "back end: the operation"),
    ("t3", "return: until the front end knows"),
    ("busy", "back end, while others wait behind it"),
)


def render_asynchrony(found: Asynchrony, toy: Mapping[str, Timing], device: str) -> list[str]:
    """t1, t2, t3; n calls of both kinds beside their prediction; the chapter's toy."""
    parts = [
        (name, duration(timing.mean_s), duration(timing.median_s), quartiles(timing), text)
        for name, text in _PARTS
        for timing in (getattr(found, name),)
    ]
    calls = [
        _row("blocking", "n (t1 + t2 + t3)", found.blocking_s, found.blocking_predicted_s),
        _row(
            "queued",
            f"{found.parts} (t1 + t3) + n busy",
            found.queued_s,
            found.queued_predicted_s,
        ),
    ]
    return [
        f"operation: {found.operation}",
        f"back end: {found.title}",
        "",
        *table(("", "mean", "median", "middle half", ""), parts),
        "",
        *table((f"{found.calls:,} calls", "measured", "predicted", "error", "by"), calls),
        f"by the means above; t1 + n t2 + t3 in {found.parts} parts, which take turns with single",
        "calls, and with t2 as it is while others wait",
        *_doubt(found),
        f"queueing saves {1 - found.queued_s / found.blocking_s:.0%}; "
        f"the queue holds {found.depth:,} operations, then it blocks the front end",
        "",
        "ten times a random 1000 x 1000 matrix and its square, as in the chapter (13.2.1):",
        *table(
            ("", "median", "middle half"),
            [(name, duration(one.median_s), quartiles(one)) for name, one in toy.items()],
        ),
        *_honest(device),
    ]


def _row(name: str, formula: str, measured_s: float, predicted_s: float) -> tuple[str, ...]:
    error = predicted_s / measured_s - 1
    return (name, duration(measured_s), duration(predicted_s), f"{error:+.1%}", formula)


def _doubt(found: Asynchrony) -> list[str]:
    """What to think of a prediction that is far off."""
    errors = (
        found.blocking_predicted_s / found.blocking_s - 1,
        found.queued_predicted_s / found.queued_s - 1,
    )
    if max(abs(error) for error in errors) <= _CLOSE:
        return []
    return ["more than 10 % off: other work on this machine disturbed the measurement; repeat it"]


def _honest(device: str) -> list[str]:
    if device != "cpu":
        return []
    return [
        "On a CPU torch has done the work when it returns, so waiting changes nothing here; what",
        "is queued above is queued by us.",
    ]
