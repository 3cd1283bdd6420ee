"""The protocols by name, and how a name on the command line becomes one.

A new protocol is a file here, or a section in that of its sister; one line in the table, and its
claims in tests/protocols. The contract test runs over the table. Beside them lie staleness.py,
what a stale gradient is worth under any of them, and outer.py and streaming.py, what the mean
difference is worth under those with local steps, and in which parts it is exchanged.
"""

import re
from typing import TYPE_CHECKING

from ..errors import ConfigError
from ..fields import read_name, spelled, written
from .adaptive import Adaptive
from .adaptive_local import AdaptiveLocal
from .asynchronous import Async
from .base import SyncProtocol
from .full_sync import FullSync
from .k_async import KAsync, KBatchAsync
from .k_sync import KBatchSync, KSync
from .local_sgd import LocalSgd, PostLocalSgd
from .outer import AVERAGING, SPELLINGS, OuterOptimizer, parse_outer
from .stale_synchronous import StaleSynchronous
from .staleness import WHOLE, parse_staleness
from .streaming import AT_ONCE, Streaming, parse_streaming, steps_between

if TYPE_CHECKING:
    from ..config import RunSettings

PROTOCOLS: dict[str, type[SyncProtocol]] = {
    "full-sync": FullSync,
    "k-sync": KSync,
    "k-batch-sync": KBatchSync,
    "async": Async,
    "k-async": KAsync,
    "k-batch-async": KBatchAsync,
    "stale-synchronous": StaleSynchronous,
    "local-sgd": LocalSgd,
    "post-local-sgd": PostLocalSgd,
    "adaptive": Adaptive,
    "adaptive-local": AdaptiveLocal,
}

ALIASES = {
    "allreduce": "full-sync",
    "asgd": "async",
    "bsp": "full-sync",
    "ddp": "full-sync",
    "ssp": "stale-synchronous",
}


def spelling(name: str) -> str:
    """How a protocol of the table is written: ``full-sync``, ``k-sync:K``."""
    return spelled(name, PROTOCOLS[name].arguments)


def with_number(name: str, number: int) -> str:
    """A protocol of the table, with this number wherever it has one; for tests of all of them."""
    return written(name, [number] * len(PROTOCOLS[name].arguments))


def split_names(text: str) -> tuple[str, ...]:
    """The protocols in a list with commas; what begins with a digit belongs to the one before.

    Example:
        >>> split_names("full-sync,local-sgd:8+nesterov:0.7,0.9,async")
        ('full-sync', 'local-sgd:8+nesterov:0.7,0.9', 'async')
    """
    parts = re.split(r",(?!\s*[.\d])", text)
    return tuple(one.strip() for one in parts if one.strip())


def protocol_of(settings: "RunSettings", num_workers: int | None = None) -> SyncProtocol:
    """What a run's settings name.

    Args:
        num_workers: None: as the settings say.

    Raises:
        ConfigError: see ``parse``.
    """
    return parse(
        settings.protocol,
        settings.workers if num_workers is None else num_workers,
        settings.staleness,
        settings.outer,
        Streaming(num_fragments=settings.fragments, overlap_steps=settings.overlap),
    )


def parse(
    text: str,
    num_workers: int,
    staleness: str = "none",
    outer: str = "none",
    streaming: Streaming = AT_ONCE,
) -> SyncProtocol:
    """The protocol that ``name``, ``name:number`` or ``name:number+rule`` means.

    A rule is one for stale pushes, an outer optimizer, or fragments.

    Args:
        num_workers: of the run.
        staleness: the rule where the text names none; under a protocol that never uses a stale
            push it does nothing, and is left out.
        outer: the outer optimizer where the text names none.
        streaming: in which parts is exchanged, where the text does not say.

    Raises:
        ConfigError: a name is unknown, a number is missing, not one, or out of its range, two
            rules of a kind are named, or an outer optimizer or fragments where gradients are
            pushed.

    Example:
        >>> str(parse("k-sync:3", num_workers=4))
        'k-sync:3'
        >>> str(parse("ssp:2", num_workers=4))
        'stale-synchronous:2'
        >>> str(parse("async+drop:6", num_workers=4))
        'async+drop:6'
        >>> str(parse("local-sgd:8", num_workers=4, outer="nesterov:0.7,0.9"))
        'local-sgd:8+nesterov:0.7,0.9'
        >>> parse("local-sgd:8+fragments:4,1", num_workers=4).num_steps
        2
    """
    body, *own = re.split(r"\+(?=\s*[a-z])", text)  # not that of 5e+02
    rule, optimizer = parse_staleness(staleness), parse_outer(outer)
    for one in own:
        if one.strip().partition(":")[0] in SPELLINGS:
            if optimizer not in (AVERAGING, parse_outer(one)):
                raise ConfigError(
                    f"{text} names an outer optimizer, and {optimizer} is another: give one"
                )
            optimizer = parse_outer(one)
        elif one.strip().startswith("fragments"):
            if streaming not in (AT_ONCE, parse_streaming(one)):
                raise ConfigError(f"{text} names fragments, and {streaming} are others: give one")
            streaming = parse_streaming(one)
        else:
            if rule is not WHOLE:
                raise ConfigError(f"{text} names a staleness rule, and {rule} is another: give one")
            rule = parse_staleness(one)
    protocol = _parse_one(body, num_workers)
    if protocol.has_stale_pushes and num_workers > 1:
        protocol.staleness = rule
    elif rule is not WHOLE:
        protocol.idle_rule = str(rule)
    if optimizer != AVERAGING:
        protocol.outer = _allowed(optimizer, protocol)
    if streaming != AT_ONCE:
        _stream(protocol, streaming)
    return protocol


def _stream(protocol: SyncProtocol, streaming: Streaming) -> None:
    """Exchange in fragments. ConfigError: this protocol cannot."""
    if not protocol.can_stream:
        why = "workers push gradients"
        if protocol.update_rule == "mean":
            why = "H changes, and a fragment is exchanged every H/F steps"
        others = [spelling(name) for name, one in PROTOCOLS.items() if one.can_stream]
        raise ConfigError(
            f"{streaming} are parts of what local steps have changed, and under {protocol} {why}; "
            f"leave --fragments and --overlap out, or use --protocol {' or '.join(others)}"
        )
    protocol.num_steps = steps_between(
        streaming, str(protocol), protocol.num_steps, protocol.num_workers
    )
    protocol.streaming = streaming


def _allowed(outer: OuterOptimizer, protocol: SyncProtocol) -> OuterOptimizer:
    """``outer``; ConfigError: this protocol pushes gradients."""
    if protocol.update_rule == "mean":
        return outer
    others = [spelling(name) for name, one in PROTOCOLS.items() if one.update_rule == "mean"]
    raise ConfigError(
        f"outer {outer} steps on the mean of what local steps have changed, and under {protocol} "
        f"workers push gradients, on which your own optimizer steps; leave it out, or use "
        f"--protocol {' or '.join(others)}"
    )


def _parse_one(text: str, num_workers: int) -> SyncProtocol:
    members = {name: one.arguments for name, one in PROTOCOLS.items()}
    name, values = read_name(text, "protocol", members, ALIASES)
    return PROTOCOLS[name](num_workers, *values)
