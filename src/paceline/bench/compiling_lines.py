"""A comparison of ways as lines of plain text; this module must not know how it was measured."""

from .compiling import ROUNDS, Gain, Result, WaysCompared
from .lines import duration, quartiles, size, table

_HEADER = ("way", "first call", "a call", "middle half", "speed", "peak memory", "ahead after")


def render_ways(found: WaysCompared) -> list[str]:
    """The table, then what a table cannot say."""
    asked = found.question
    failed = [one for one in found.results if one.failure]
    return [
        f"{asked.subject}, batch {asked.batch_size}, forward, float32, {asked.device}, "
        f"{asked.threads} thread{'s' * (asked.threads != 1)}; {found.calls:,} calls each, in turns",
        "",
        *table(_HEADER, [_row(one) for one in found.results]),
        "",
        *(f"{one.way}: not possible here: {one.failure}" for one in failed),
        *_other_batches(found),
        f"a call: median of {ROUNDS} blocks; speed: eager's time over the way's, block by block",
        "ahead after: calls after which it is ahead of eager, what it cost at first included",
        *_memory(asked.device),
    ]


def _row(one: Result) -> tuple[str, ...]:
    if one.failure:
        return (one.way, "failed", *["-"] * (len(_HEADER) - 2))
    assert one.call is not None
    return (
        one.way,
        duration(one.first_call_s),
        duration(one.call.median_s),
        quartiles(one.call),
        "1" if one.gain is None else f"{one.gain.speedup:.2f}",
        size(one.peak_bytes),
        "-" if one.gain is None else _ahead(one, one.gain),
    )


def _ahead(one: Result, gain: Gain) -> str:
    if one.break_even_calls is None:
        return "not clear" if gain.is_faster is None else "never"
    return f"{one.break_even_calls:,} calls"


def _other_batches(found: WaysCompared) -> list[str]:
    """What happened when the batch changed, and that all outputs agree."""
    lines = []
    for one in found.results:
        if len(one.other_batches_s) == 2 and one.recompiles is not None:
            first, second = (duration(value) for value in one.other_batches_s)
            breaks = f", {one.graph_breaks} graph breaks" if one.graph_breaks else ""
            lines.append(
                f"{one.way}: two other batch sizes: {one.recompiles} recompiles ({first}, then "
                f"{second}){breaks}"
            )
        if one.other_batches_failure:
            lines.append(f"{one.way}: fails with other batch sizes: {one.other_batches_failure}")
    differences = [one.max_difference for one in found.results if one.max_difference is not None]
    lines.append(f"outputs differ from eager's by at most {max(differences):.1e}")
    return lines


def _memory(device: str) -> list[str]:
    if device != "cpu":
        return []
    return ["peak memory: of the whole process, with Python and torch; compilers run beside it"]
