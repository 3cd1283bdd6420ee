"""How a run's gradients are summed: what was asked for, and whether it is possible.

    --path  --collective     what sums                        a run's path
    auto    auto             chosen (`path_of`)               any
            shared           each worker its share, memory of all    peers; of ranks: collective
            native           torch.distributed's all-reduce   collective
            ring, tree, ...  a schedule of `collectives/`     collective

A path is chosen before members start, since they are told of it. This module must not know tensors
or processes.
"""

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..collectives import ALIASES, COLLECTIVES, parse
from ..collectives.choose import candidates
from ..collectives.host import HostCost, at
from ..collectives.transfers import Operation
from ..config import RunSettings
from ..engines.base import Traits
from ..errors import ConfigError, FileError, unknown
from ..exchange import CPU_BUCKET_BYTES, FIRST_BUCKET_BYTES, SHARED
from ..plan import format_bytes
from ..protocols.base import SyncProtocol
from ..report.text import format_duration
from ..system.ceilings import ceilings_path, read_ceilings, write_ceilings
from ..system.processors import count_accelerators, num_cores

AUTO: Final = "auto"
NATIVE: Final = "native"
SECTION: Final = "collectives"
"""Of the file of ceilings: measurements by the number of processes, as text."""
_WORTH_IT = 0.9
"""A schedule replaces torch's own if it takes less than this share of its time, as predicted."""


def path_of(settings: RunSettings, protocol: SyncProtocol) -> str:
    """The path that was asked for; ``auto`` if none was.

    ``collective`` if every worker of a protocol between peers has its own accelerator, or if
    workers share no memory.

    Raises:
        ConfigError: path, collective, protocol and engine contradict each other.
    """
    if settings.collective != AUTO:
        _check(settings, protocol)
        return _path_of_collective(settings)
    if settings.engine == "torchrun":
        return "collective"
    is_free = settings.path == AUTO and settings.engine == "local" and settings.workers > 1
    if is_free and protocol.is_spmd and count_accelerators(settings.device) >= settings.workers:
        return "collective"
    return settings.path


def _path_of_collective(settings: RunSettings) -> str:
    """The path of the collective that was asked for; ranks map memory, but have no store in it."""
    is_in_store = settings.collective == SHARED and settings.engine != "torchrun"
    return "peers" if is_in_store else "collective"


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownCosts:
    """The known cost of sums between the workers of a run.

    Args:
        cost: the time of rounds; None: not known.
        day: when it was measured.
        why_not: why it is not known, in words.
    """

    cost: HostCost | None = None
    day: str = ""
    why_not: str = ""


UNMEASURED = KnownCosts()
_NO_RANKS = "the workers are not ranks of torchrun"


def why_not_shared(
    settings: RunSettings, traits: Traits, device: str, overlap_steps: int = 0
) -> str:
    """Why ranks of torchrun do not sum in memory that all map; empty: they can."""
    if settings.engine != "torchrun":
        return _NO_RANKS
    if traits.why_unmapped:
        return f"the ranks cannot map each other's memory ({traits.why_unmapped})"
    if overlap_steps:
        return f"overlap {overlap_steps}: in shared memory nothing is added while all compute"
    if not device.startswith("cpu"):
        return f"the model lies on {device}"
    if settings.compress != "none":
        return f"compress {settings.compress}: compressed gradients are sent as messages"
    return ""


def refuse_if_split(settings: RunSettings) -> None:
    """Raise ConfigError if a collective was asked for, which the parts of a model do not use."""
    if settings.collective not in (AUTO, NATIVE):
        raise ConfigError(
            f"collective {settings.collective!r} is not supported with a split model, whose parts "
            "exchange what they need by torch.distributed: use --collective auto, or --split data"
        )


def measured_for(settings: RunSettings, traits: Traits, device: str) -> KnownCosts:
    """What ``paceline bench collectives`` measured on this machine for such a run."""
    if settings.collective != AUTO or settings.workers == 1:
        return UNMEASURED
    if settings.deterministic:
        return KnownCosts(why_not="another measurement might choose another order of sums")
    if not device.startswith("cpu"):
        return KnownCosts(why_not="schedules are measured between CPUs only")
    if not traits.is_one_machine:
        return KnownCosts(why_not="messages between these machines are not measured")
    return read_measured(settings.workers, *read_ceilings(SECTION))


def read_measured(num_workers: int, section: Any, why_not: str) -> KnownCosts:
    """What a section of the file of ceilings says about so many workers.

    Args:
        section: as it was found; None: there is none.
        why_not: why it was not read.
    """
    command = f"paceline bench collectives --workers {num_workers}"
    unknown = f"{num_workers} processes are not measured here: {command}"
    if section is None:
        return KnownCosts(why_not=why_not or unknown)
    try:
        own = section.get(str(num_workers))
        if own is None:
            return KnownCosts(why_not=unknown)
        if own["cores"] != num_cores():
            return KnownCosts(
                why_not=f"it was measured on {own['cores']} cores, but here are {num_cores()}: "
                f"{command}"
            )
        cost = HostCost.read(own["cost"])
        if cost.num_ranks != num_workers:
            raise ValueError(f"they are of {cost.num_ranks} processes")
        return KnownCosts(cost=cost, day=str(own["day"]))
    except (ValueError, TypeError, KeyError, AttributeError, ConfigError):
        return KnownCosts(why_not=f"{ceilings_path()} holds no valid times: {command}")


def keep_measured(cost: HostCost) -> Path:
    """Save a measurement for plans of runs on this machine; returns the file's path.

    Raises:
        FileError: it cannot be written there.
    """
    section, _ = read_ceilings(SECTION)
    known = section if isinstance(section, dict) else {}
    own = {"cores": num_cores(), "day": time.strftime("%Y-%m-%d"), "cost": cost.write()}
    return write_ceilings(SECTION, {**known, str(cost.num_ranks): own})


def tell_kept(cost: HostCost) -> str:
    """Save a measurement; returns a sentence on where it is, or why it is not saved."""
    try:
        return f"kept in {keep_measured(cost)}"
    except FileError as error:
        return f"not kept: {error}"


def collective_of(
    settings: RunSettings,
    path: str,
    gradient_bytes: int = 0,
    measured: KnownCosts = UNMEASURED,
    why_not_shared: str = _NO_RANKS,
) -> tuple[str, str]:
    """What sums in a run by this path, and why; empty: the store sums the pushes.

    Args:
        gradient_bytes: of one worker, which are summed.
        why_not_shared: why the ranks of torchrun do not sum in shared memory; empty: they can.

    Raises:
        ConfigError: they were asked to, and cannot.
    """
    if path == "store":
        return "", ""
    if settings.collective not in (AUTO, NATIVE):
        name = settings.collective
        if name == SHARED and path == "collective" and why_not_shared:
            raise ConfigError(
                f"collective {name!r} cannot be used: {why_not_shared}; leave the setting out, or "
                "use native or a schedule such as ring"
            )
        return name if name == SHARED else str(parse(name, settings.workers)), "as asked for"
    if path == "peers":
        return SHARED, "each worker its share, in memory that all see"
    if settings.collective == AUTO and not why_not_shared:
        return SHARED, "each rank its share, in memory that all map"
    own = "torch.distributed's own all-reduce"
    if settings.collective == NATIVE or measured.cost is None:
        return NATIVE, f"{own}; {measured.why_not}" if measured.why_not else own
    return fastest(gradient_bytes, settings.engine, measured.cost, measured.day)


def fastest(gradient_bytes: int, engine: str, cost: HostCost, day: str) -> tuple[str, str]:
    """The collective predicted to be the fastest for so many bytes, and why.

    All but the last of the buckets of torchrun's ranks overlap with the backward pass: torch's own
    sum in a thread without Python, a schedule in one that takes turns with the script's. Only
    measurements beside such a pass count there.
    """
    sizes = bucket_sizes(gradient_bytes) if engine == "torchrun" else [gradient_bytes]
    *beside, last = sizes
    names = [name for name in candidates(cost.num_ranks) if not beside or name in cost.beside_s]
    if not names:
        command = f"paceline bench collectives --workers {cost.num_ranks}"
        return NATIVE, f"schedules beside a backward pass are not measured here: {command}"

    def beside_s(name: str) -> float:
        return math.fsum(at(cost.beside_s[name], size) for size in beside)

    took_s = {
        name: cost.seconds(parse(name, cost.num_ranks), Operation.ALL_REDUCE, last) + beside_s(name)
        for name in names
    }
    best = min(took_s, key=lambda name: took_s[name])
    native_s = cost.native_reduce_s(last) + beside_s(NATIVE) if cost.native_s else math.inf
    name, other = (best, NATIVE) if took_s[best] < _WORTH_IT * native_s else (NATIVE, best)
    took_s[NATIVE] = native_s
    why = f"{format_duration(took_s[name])} for {format_bytes(gradient_bytes)}"
    if math.isfinite(took_s[other]):
        why += f", {other} {format_duration(took_s[other])}"
    return name, f"{why}, by what messages took here on {day}"


def bucket_sizes(num_bytes: int) -> list[int]:
    """The sizes of the buckets in which the ranks of torchrun sum so many bytes."""
    sizes: list[int] = []
    while num_bytes > 0:
        sizes.append(min(num_bytes, CPU_BUCKET_BYTES if sizes else FIRST_BUCKET_BYTES))
        num_bytes -= sizes[-1]
    return sizes or [0]


def _check(settings: RunSettings, protocol: SyncProtocol) -> None:
    """Raise ConfigError if this collective does not exist or contradicts other settings."""
    name = settings.collective
    if name not in (SHARED, NATIVE):
        known = (AUTO, SHARED, NATIVE, *COLLECTIVES, *ALIASES)
        if (given := name.strip().partition(":")[0]) not in known:
            raise unknown("collective", given, known)
        parse(name, settings.workers)
    what = f"collective {name!r} cannot be used: "
    if not protocol.is_spmd:
        raise ConfigError(
            f"{what}protocol {settings.protocol} decides after each push; leave the setting out, "
            "or use --protocol full-sync or local-sgd:H"
        )
    if settings.engine == "inline":
        raise ConfigError(
            f"{what}engine inline runs its members in turn; leave the setting out, or use "
            "--engine local"
        )
    path = _path_of_collective(settings)
    if settings.path not in (AUTO, path):
        raise ConfigError(
            f"path {settings.path!r} and collective {name!r} exclude each other; leave the path "
            f"out, or use --path {path}"
        )
