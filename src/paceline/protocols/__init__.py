"""The protocols by name, and how a name on the command line becomes one.

A new protocol is a file here, or a section in that of its sister; one line in the table, and its
claims in tests/protocols. The contract test runs over the table. Beside them lies staleness.py,
what a stale gradient is worth under any of them.
"""

from ..errors import ConfigError
from ..fields import read_name, spelled
from .adaptive import Adaptive
from .adaptive_local import AdaptiveLocal
from .asynchronous import Async
from .base import SyncProtocol
from .full_sync import FullSync
from .k_async import KAsync, KBatchAsync
from .k_sync import KBatchSync, KSync
from .local_sgd import LocalSgd
from .stale_synchronous import StaleSynchronous
from .staleness import WHOLE, parse_staleness

PROTOCOLS: dict[str, type[SyncProtocol]] = {
    "full-sync": FullSync,
    "k-sync": KSync,
    "k-batch-sync": KBatchSync,
    "async": Async,
    "k-async": KAsync,
    "k-batch-async": KBatchAsync,
    "stale-synchronous": StaleSynchronous,
    "local-sgd": LocalSgd,
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
    return spelled(name, PROTOCOLS[name].argument)


def parse(text: str, num_workers: int, staleness: str = "none") -> SyncProtocol:
    """The protocol that ``name``, ``name:number`` or ``name:number+rule`` means.

    Args:
        num_workers: of the run.
        staleness: the rule where the text names none; under a protocol that never uses a stale
            push it does nothing, and is left out.

    Raises:
        ConfigError: a name is unknown, a number is missing, not one, or out of its range, or two
            rules are named.

    Example:
        >>> str(parse("k-sync:3", num_workers=4))
        'k-sync:3'
        >>> str(parse("ssp:2", num_workers=4))
        'stale-synchronous:2'
        >>> str(parse("async+drop:6", num_workers=4))
        'async+drop:6'
    """
    body, plus, own = text.partition("+")
    rule = parse_staleness(staleness)
    if plus:
        if rule is not WHOLE:
            raise ConfigError(f"{text} names a staleness rule, and {rule} is another: give one")
        rule = parse_staleness(own)
    protocol = _parse_one(body, num_workers)
    if protocol.has_stale_pushes and num_workers > 1:
        protocol.staleness = rule
    elif rule is not WHOLE:
        protocol.idle_rule = str(rule)
    return protocol


def _parse_one(text: str, num_workers: int) -> SyncProtocol:
    arguments = {name: one.argument for name, one in PROTOCOLS.items()}
    name, value = read_name(text, "protocol", arguments, ALIASES)
    return PROTOCOLS[name](num_workers, value)
