"""The protocols by name, and the parser of their names on the command line.

A new protocol is a file here, or a section in the file of a related one; one line in the table, and
its claims in tests/protocols. The contract test runs over the table. staleness.py has the rules for
stale gradients under any protocol; outer.py and streaming.py decide, for protocols with local
steps, how the mean difference is applied and in which parts it is exchanged.
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
    """Return how a protocol is written: ``full-sync``, ``k-sync:K``."""
    return spelled(name, PROTOCOLS[name].arguments)


def with_number(name: str, number: int) -> str:
    """Return a protocol's name with this number as each of its arguments; for tests of all."""
    return written(name, [number] * len(PROTOCOLS[name].arguments))


def split_names(text: str) -> tuple[str, ...]:
    """Split a list at commas; a part that begins with a digit belongs to the name before it.

    Example:
        >>> split_names("full-sync,local-sgd:8+nesterov:0.7,0.9,async")
        ('full-sync', 'local-sgd:8+nesterov:0.7,0.9', 'async')
    """
    parts = re.split(r",(?!\s*[.\d])", text)
    return tuple(part.strip() for part in parts if part.strip())


def protocol_of(settings: "RunSettings", num_workers: int | None = None) -> SyncProtocol:
    """Return the protocol that a run's settings name.

    Args:
        num_workers: None: the settings' number.

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
    """Return the protocol that ``name``, ``name:number`` or ``name:number+rule`` means.

    A rule is a staleness rule, an outer optimizer, or fragments.

    Args:
        num_workers: of the run.
        staleness: the rule if the text names none; left out under a protocol that never uses a
            stale push.
        outer: the outer optimizer if the text names none.
        streaming: the fragments if the text names none.

    Raises:
        ConfigError: a name is unknown, a number is missing, invalid or out of range, two rules of
            one kind are named, or an outer optimizer or fragments where gradients are pushed.

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
    body, *rules = re.split(r"\+(?=\s*[a-z])", text)  # not the + of 5e+02
    rule, optimizer = parse_staleness(staleness), parse_outer(outer)
    for part in rules:
        if part.strip().partition(":")[0] in SPELLINGS:
            if optimizer not in (AVERAGING, parse_outer(part)):
                raise ConfigError(
                    f"{text} names an outer optimizer, but {optimizer} is set too: give only one"
                )
            optimizer = parse_outer(part)
        elif part.strip().startswith("fragments"):
            if streaming not in (AT_ONCE, parse_streaming(part)):
                raise ConfigError(
                    f"{text} names fragments, but {streaming} is set too: give only one"
                )
            streaming = parse_streaming(part)
        else:
            if rule is not WHOLE:
                raise ConfigError(
                    f"{text} names a staleness rule, but {rule} is set too: give only one"
                )
            rule = parse_staleness(part)
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
    """Make the protocol exchange in fragments; raise ConfigError if it cannot."""
    if not protocol.can_stream:
        reason = "workers push gradients"
        if protocol.update_rule == "mean":
            reason = "H changes, and a fragment is exchanged every H/F steps"
        others = [spelling(name) for name, kind in PROTOCOLS.items() if kind.can_stream]
        raise ConfigError(
            f"{streaming} needs local steps with a fixed H, but under {protocol} {reason}; "
            f"leave --fragments and --overlap out, or use --protocol {' or '.join(others)}"
        )
    protocol.num_steps = steps_between(
        streaming, str(protocol), protocol.num_steps, protocol.num_workers
    )
    protocol.streaming = streaming


def _allowed(outer: OuterOptimizer, protocol: SyncProtocol) -> OuterOptimizer:
    """Return ``outer``; raise ConfigError if this protocol pushes gradients."""
    if protocol.update_rule == "mean":
        return outer
    others = [spelling(name) for name, kind in PROTOCOLS.items() if kind.update_rule == "mean"]
    raise ConfigError(
        f"outer {outer} steps on the mean change of local steps, but under {protocol} workers "
        f"push gradients, on which your own optimizer steps; leave it out, or use "
        f"--protocol {' or '.join(others)}"
    )


def _parse_one(text: str, num_workers: int) -> SyncProtocol:
    members = {name: kind.arguments for name, kind in PROTOCOLS.items()}
    name, values = read_name(text, "protocol", members, ALIASES)
    return PROTOCOLS[name](num_workers, *values)
