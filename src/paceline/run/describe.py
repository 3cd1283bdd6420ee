"""A member's description of its model and data, and the plan that follows from it.

The plan is shown before the first step; what cannot work is refused here. Above 300 lines
because of all that is compared. This module must not know processes or terminals.
"""

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import Any

from ..compression import parse as parse_compression
from ..config import RunSettings
from ..data.likeness import Likeness, are_others
from ..engines.base import Traits
from ..errors import ConfigError
from ..machine.ceilings import read_machine
from ..plan import CompressionPrice, LayerParameters, Plan
from ..protocols.base import SyncProtocol
from ..protocols.staleness import WHOLE
from ..protocols.streaming import AT_ONCE
from ..report.text import format_duration
from ..system.processors import num_cores
from .collective import (
    AUTO,
    UNMEASURED,
    KnownCosts,
    collective_of,
    path_of,
    refuse_if_split,
    why_not_shared,
)

_REMEDY = (
    "; usually they were shuffled or split without a seed before paceline.connect(), or listed in "
    "no fixed order: write random_split(data, lengths, torch.Generator().manual_seed(0)), "
    "sorted(files), and do not split the data by worker: Paceline distributes the samples"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What one member prepared; the descriptions of all members must agree."""

    digest: str
    task: str
    source: str
    program: str
    threads: int
    device: str
    num_parameters: int
    update_bytes: int
    arena_bytes: int
    pinned_bytes: int
    """At the end of the arena: what a checkpoint is written from, released afterwards; 0 for a
    split model, which is written from all workers."""
    num_samples: int
    batch_size: int
    """Global: samples an update averages (per local step)."""
    drop_last: bool
    has_own_batches: bool
    order: str
    """Whether the order of an epoch can be drawn again: "in order", "shuffled" or "own"; or
    "numbers": there is no loader, and the script counts updates; or "stream": positions are the
    numbers of its mini-batches, and how many there are is not known."""
    lookahead: int
    """Mini-batches that the loader fetches ahead."""
    learning_rates: tuple[float, ...]
    epochs: int
    grain: str
    can_share: bool
    """Whether the model can live in shared memory between peers."""
    notes: tuple[str, ...]
    could_try: tuple[str, ...] = ()
    """What ``--fast auto`` would try, where it was not asked for."""
    rounding: tuple[str, ...] = ()
    """What is in effect that rounds otherwise than plain code does."""
    samples: tuple[Likeness, ...] = ()
    num_optimizers: int = 1
    samples_each: int = 1
    """Of a position: of a stream, those of a mini-batch."""
    accumulate: int = 1
    """Mini-batches that a push is computed of, one after the other."""
    is_sticky: bool = False
    """Whether part j of every batch is one worker's."""
    steps_together: bool = False
    """Whether all members make each step together, each with an optimizer of its own."""
    parameter_table: tuple[LayerParameters, ...] = ()
    """Of ``--parameters``."""
    compression: CompressionPrice | None = None
    """Of ``--compress``."""
    split: str = ""
    """How the model is cut, in words; empty: each worker has all of it."""
    split_bytes: int = 0
    """That flow between its parts, an update."""
    machine: str = ""
    """What computes, by its maker's name."""
    num_loading: int = 0
    """Processes that load for this member."""
    checkpoint_bytes: int = 0
    """Of the tensors in a checkpoint, about."""

    @classmethod
    def read(cls, text: str) -> "Description":
        values = json.loads(text)
        for name in ("learning_rates", "notes", "could_try", "rounding"):
            values[name] = tuple(values[name])
        values["samples"] = tuple(Likeness(*one) for one in values["samples"])
        layers = values.get("parameter_table", ())
        values["parameter_table"] = tuple(LayerParameters(*one) for one in layers)
        if values.get("compression") is not None:
            values["compression"] = CompressionPrice(**values["compression"])
        return cls(**values)

    def difference(self, other: "Description") -> str:
        """How another member's description differs, in words; empty: no known difference."""
        if self.num_samples != other.num_samples:
            return f"different data: {self.num_samples} and {other.num_samples} samples{_REMEDY}"
        if self.digest != other.digest:
            return (
                "different models or batches (names, shapes or sizes differ); build them the "
                "same way in every worker"
            )
        number = are_others(self.samples, other.samples)
        return "" if number is None else f"different data: sample {number} differs{_REMEDY}"

    def refuse_another_kind(self, other: "Description", seat: int, path: str) -> None:
        """Raise ConfigError if a sum between two kinds of devices would wait for ever.

        Args:
            other: what the worker on ``seat`` describes.
            path: how gradients move.
        """
        own, other_kind = (description.device.partition(":")[0] for description in (self, other))
        if path == "collective" and own != other_kind:
            raise ConfigError(
                f"worker 0 computes on {own} and worker {seat} on {other_kind}, and these cannot "
                "be summed together: use --device cpu (PACELINE_DEVICE=cpu) for all, or give each "
                "an accelerator; paceline env says why a machine's is not found"
            )

    @property
    def pinned(self) -> tuple[int, int]:
        """Where in the arena, from and to."""
        return self.arena_bytes - self.pinned_bytes, self.arena_bytes

    def write(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def update_rule(self, protocol: SyncProtocol) -> str:
        """What a push is: see ``SyncProtocol.update_rule``."""
        return "mean" if self.steps_together else protocol.update_rule

    def identity(self, plan: Plan, protocol: SyncProtocol) -> dict[str, Any]:
        """What must be equal for a checkpoint to be usable, by the words of a message."""
        is_stream = self.order == "stream"
        return {
            "task": self.task,
            "kind of update": self.update_rule(protocol),
            "outer optimizer": protocol.outer.name,
            "fragments": str(protocol.streaming),
            "model or optimizer": self.digest.partition("-")[0],
            **({} if is_stream else {"number of samples": self.num_samples}),
            "batch size": plan.samples_per_update,
            "last batch": "left out" if self.drop_last else "kept",
            **({"mini-batch": self.samples_each} if is_stream else {}),
        }

    def header(self, plan: Plan, settings: RunSettings) -> dict[str, Any]:
        """Returns what the first line of the trace says about the run."""
        return {
            "task": self.task,
            "source": self.source,
            "protocol": plan.protocol,
            "staleness": plan.staleness,
            "outer": plan.outer,
            "fragments": plan.fragments,
            "workers": settings.workers,
            "engine": plan.engine,
            "path": plan.path,
            "compress": settings.compress,
            "split": self.split,
            **({} if plan.compression is None else plan.compression.header()),
            "collective": plan.collective,
            "batch_size": plan.samples_per_update,
            "mini_batch_size": plan.mini_batch_size,
            "pushes_per_update": plan.pushes_per_update,
            "num_samples": self.num_samples,
            "seed": settings.seed,
            "order": self.order,
            "device": self.device,
            "machine": self.machine,
            "model": self.digest.partition("-")[0],
            "learning_rates": list(self.learning_rates),
            "num_parameters": self.num_parameters,
            "update_bytes": self.update_bytes,
            "epochs": plan.epochs,
            "updates_total": plan.updates_total,
            "seconds": settings.seconds,
            "could_try": list(self.could_try),
            "delay": list(settings.delay),
            "slow": list(settings.slow),
            "cores": num_cores(),
            "program": self.program,
            "threads": self.threads,
            "rounding": list(self.rounding),
            "lookahead": self.lookahead,
            "drop_last": self.drop_last,
            "samples_each": self.samples_each,
            "init": settings.init,
            "dropped": settings.dropped,
            "nonfinite": settings.nonfinite,
            "accumulate": self.accumulate,
            "warmup": settings.warmup,
        }


def make_plan(
    first: Description,
    protocol: SyncProtocol,
    settings: RunSettings,
    traits: Traits,
    measured: KnownCosts = UNMEASURED,
) -> Plan:
    """Settle every number of the run. ConfigError: something cannot work."""
    parts = protocol.num_pushes
    batch = first.batch_size * first.samples_each
    check_size(first, parts)
    updates, epochs, total = _length(first, protocol, settings)
    path = _path(first, protocol, settings, traits)
    _refuse_to_compress(first, settings, path)
    _refuse_to_stream(first, protocol, settings, path)
    why_not = why_not_shared(settings, traits, first.device, protocol.streaming.overlap_steps)
    collective, why = collective_of(settings, path, first.update_bytes, measured, why_not)
    if first.split:
        refuse_if_split(settings)
        collective, why = "", ""
    return Plan(
        task=first.task,
        source=first.source,
        workers=settings.workers,
        device=first.device,
        engine=traits.name,
        path=path,
        protocol=str(protocol),
        mini_batch_size=-(-batch // parts),
        pushes_per_update=parts,
        samples_per_update=batch,
        updates_per_epoch=updates,
        epochs=epochs,
        updates_total=total,
        lr=first.learning_rates[0] if first.learning_rates else math.nan,
        num_parameters=first.num_parameters,
        update_bytes=first.split_bytes if first.split else first.update_bytes * parts,
        shared_bytes=first.arena_bytes,
        grain=first.grain,
        notes=(
            *_notes(first, protocol),
            *_promise(protocol, settings, path),
            *_crowding(first, settings, traits),
        ),
        staleness=str(protocol.staleness),
        outer=str(protocol.outer),
        fragments=protocol.streaming.num_fragments,
        overlap=protocol.streaming.overlap_steps,
        local_steps=protocol.num_steps,
        accumulate=first.accumulate,
        parameter_table=first.parameter_table,
        compression=first.compression,
        collective=collective,
        collective_why=why,
        split=first.split,
        update_floor=_update_floor(first, parts, settings, traits),
    )


_LARGER = "or a larger --batch-size (of a script: batch_size of its loader)"


def check_size(first: Description, parts: int) -> None:
    """Raise ConfigError if there are too few samples for the mini-batches of an update."""
    has_few = first.num_samples < parts
    if not has_few and first.batch_size >= parts:
        return
    few = "samples" if has_few else "samples an update"
    remedy = "fewer workers or a smaller K"
    raise ConfigError(
        f"{min(first.num_samples, first.batch_size)} {few} cannot be shared by {parts} "
        "mini-batches; use " + (remedy if has_few else f"{remedy}, {_LARGER}")
    )


def _length(
    first: Description, protocol: SyncProtocol, settings: RunSettings
) -> tuple[int | None, int | None, int | None]:
    """Updates per epoch, epochs, and total updates; None where not known."""
    if first.order == "numbers":
        return None, None, settings.updates
    if first.order == "stream":
        return None, settings.epochs or first.epochs or None, settings.updates
    batches = first.num_samples / first.batch_size
    batches = math.floor(batches) if first.drop_last else math.ceil(batches)
    updates = math.ceil(batches / protocol.num_steps)  # the last of an epoch may be of fewer steps
    epochs = settings.epochs or first.epochs
    total = updates * epochs if epochs else None
    if settings.updates is not None:
        total = min(total, settings.updates) if total else settings.updates
    return updates, epochs, total


def _refuse_to_stream(
    first: Description, protocol: SyncProtocol, settings: RunSettings, path: str
) -> None:
    """Raise ConfigError where fragments or overlap are not supported."""
    streaming = protocol.streaming
    if streaming is AT_ONCE:
        return
    if first.order == "stream":
        raise ConfigError(
            f"{streaming}: the last update of a pass merges all fragments, and the end of a stream "
            "is not known in advance; leave out --fragments and --overlap, or give the data set a "
            "__len__"
        )
    if streaming.overlap_steps and settings.nonfinite == "skip" and path == "collective":
        raise ConfigError(
            f"overlap {streaming.overlap_steps} with nonfinite skip: whether an update is finite "
            "is known only after workers have used it; use --nonfinite error, --overlap 0, or on "
            "one machine --path store"
        )


def _notes(first: Description, protocol: SyncProtocol) -> tuple[str, ...]:
    """Notes on this run before it begins."""
    notes, parts = list(first.notes), protocol.num_pushes
    batch = first.batch_size * first.samples_each
    if batch % parts:
        sizes = sorted({batch // parts, batch // parts + 1}, reverse=True)
        notes.append(
            f"{batch} samples make {parts} mini-batches of {sizes[0]} and {sizes[1]}; "
            "each is weighted by its samples"
        )
    if protocol.is_adaptive:
        notes.append(
            f"{protocol} changes the pushes or steps of an update "
            f"{'as the loss falls' if protocol.watches_loss else 'while the run goes'}: the "
            "updates are those at its first choice"
        )
    if first.program.startswith("script ") and not protocol.is_spmd and protocol.num_workers > 1:
        notes.append(
            f"under {protocol} each worker's loop counts its own batches: enumerate(loader) does "
            "not count updates, pace.version does"
        )
    if protocol.idle_rule:
        notes.append(protocol.idle_note())
    elif protocol.staleness is not WHOLE:
        notes.append(f"staleness {protocol.staleness}: {protocol.staleness.summary}")
    return tuple(notes)


def _crowding(first: Description, settings: RunSettings, traits: Traits) -> tuple[str, ...]:
    """A note if more threads compute at once than this machine has cores, or its quota allows."""
    if not traits.is_one_machine or traits.name == "inline":
        return ()
    is_cpu = first.device.startswith("cpu")
    threads, loading, cores = first.threads if is_cpu else 1, first.num_loading, num_cores()
    wanted = settings.workers * (threads + loading)
    if wanted <= cores:
        return ()
    each = f"{threads} thread{'s' * (threads != 1)}"
    if loading:
        each += f" + {loading} that load{'s' * (loading == 1)}"
    fitting = max(1, cores // settings.workers)
    remedies = [
        *(["a smaller num_workers of the DataLoader"] if loading else []),
        *([f"--threads {fitting}"] if threads > fitting else []),
        *(["fewer workers"] if settings.workers > 1 else []),
    ]
    return (
        f"{wanted} want to compute at once ({settings.workers} x {each}), and {cores} "
        f"core{'s carry' if cores != 1 else ' carries'} them: they take turns; with "
        f"{' or '.join(remedies)} they need not",
    )


def _update_floor(first: Description, parts: int, settings: RunSettings, traits: Traits) -> str:
    """The least time to move an update's gradients through this memory, if it is known."""
    known = read_machine().get("memory_copy_bytes_per_s")
    is_here = traits.is_one_machine and settings.workers > 1 and first.device.startswith("cpu")
    if known is None or not is_here or first.split:
        return ""
    # Each byte is read and written once; STREAM counts both.
    floor_s = 2 * first.update_bytes * parts / known
    return f"at least {format_duration(floor_s)} through this memory ({read_machine().source})"


def _promise(protocol: SyncProtocol, settings: RunSettings, path: str) -> tuple[str, ...]:
    """What ``--deterministic`` gives here: a sum of two is the same in either order."""
    if not settings.deterministic:
        return ()
    is_in_turn = protocol.is_spmd
    if settings.workers == 1 or (is_in_turn and (path != "store" or settings.workers == 2)):
        return ("deterministic: on this machine the same command gives the same bits",)
    why = f"under {protocol} updates depend on when workers finish"
    if is_in_turn:
        why = "through the store gradients are summed in the order in which they arrive"
    return (
        f"deterministic: each worker's computation is, but {why}; paceline replay repeats a run "
        "of a task bit for bit",
    )


def _path(first: Description, protocol: SyncProtocol, settings: RunSettings, traits: Traits) -> str:
    """How gradients move: between peers where protocol, engine and model allow it."""
    reasons = {
        f"protocol {settings.protocol} decides after each push": protocol.is_spmd,
        f"engine {traits.name} runs its members in turn": traits.is_spmd or first.steps_together,
        f"the model lies on {first.device}": first.can_share,
        "the end of a stream is found while it is read": (
            first.order != "stream"
            or (traits.has_store and path_of(settings, protocol) != "collective")
        ),
    }
    wrong = [reason for reason, is_right in reasons.items() if not is_right]
    is_asked = settings.path in ("peers", "collective") or settings.collective != AUTO
    if is_asked and wrong:
        what = f"path {settings.path!r}"
        if settings.collective != AUTO:
            what = f"collective {settings.collective!r}"
        raise ConfigError(f"{what} cannot be used: {wrong[0]}; use path 'store'")
    is_by_store = bool(wrong) or settings.path == "store"
    if is_by_store and first.steps_together:
        why = wrong[0] if wrong else "path 'store' was asked for"
        raise ConfigError(
            "workers that make each step together (LBFGS, closures, hooks) average between peers, "
            f"but {why}; use --protocol local-sgd:1, or what allows peers: --path peers, "
            "--device cpu"
        )
    if is_by_store and not traits.has_store:
        why = wrong[0] if wrong else "path 'store' was asked for"
        raise ConfigError(
            f"engine {traits.name} averages between its workers, but {why}; "
            f"on one machine paceline launch --workers {settings.workers} supports it"
        )
    if is_by_store:
        return "store"
    return "collective" if path_of(settings, protocol) == "collective" else "peers"


def check_compression(settings: RunSettings, protocol: SyncProtocol) -> None:
    """Raise ConfigError where the settings leave no path for compressed gradients."""
    compression = parse_compression(settings.compress)
    if compression is None:
        return
    asked = f"compress {compression}"
    if not protocol.is_spmd:
        raise ConfigError(
            f"{asked} works where workers average with each other, but under {protocol} each push "
            "goes to the store by itself; use protocol full-sync or local-sgd:H"
        )
    if settings.workers < 2:
        raise ConfigError(f"{asked} needs workers that send to each other, but there is only one")
    if path_of(settings, protocol) != "collective":
        raise ConfigError(
            f"{asked}: here gradients stay in the memory of one machine, where fewer bytes save "
            "nothing; it works between machines (torchrun SCRIPT), and with path 'collective' of "
            "engine 'local'"
        )


def _refuse_to_compress(first: Description, settings: RunSettings, path: str) -> None:
    """Raise ConfigError where the model or data leave no path for compressed gradients."""
    if parse_compression(settings.compress) is None:
        return
    if first.steps_together:
        raise ConfigError(
            f"compress {settings.compress} is not supported where workers make each step together "
            "(LBFGS, closures, hooks), since that needs exact means; leave it out, or use "
            "--protocol local-sgd:1"
        )
    if path != "collective":
        raise ConfigError(
            f"compress {settings.compress} needs path 'collective', but here gradients go through "
            "the store: --path collective says why; leave one of them out"
        )
