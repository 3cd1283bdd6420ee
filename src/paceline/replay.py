"""Recompute a run from its folder, bit for bit: its task, its trace, and its saved model.

    trace header -> task, protocol and its staleness rule, ledger, work
    records      -> simulation/replay.py: decisions and gradients recomputed, first difference
    at the end   -> the parameters compared with the run's model.safetensors

The result is bitwise equal on the run's machine with the same number of threads; other processors
and versions of torch add floats in other orders. Nothing in the folder is executed: the task is
found by its name. A replay computes without options, in one process, with as many threads as a
worker had; a run that computed differently, or that the trace does not describe, is refused with
the reason before anything is computed. This module must not know terminals.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .checkpoints.state import load_tensors, save_model, tensors_of
from .core.coordinator import Coordinator
from .core.ledger import Ledger
from .errors import ConfigError
from .events import Apply
from .protocols import parse
from .simulation.peers import PeersWork
from .simulation.replay import Difference, RecordedRun, pulled_versions
from .trace import FILE_NAME, contradiction, read_header, read_trace
from .trace.records import Ended, Header, Ordered, Record, Resumed, Scalar
from .workloads import load_task

_MODEL = "model.safetensors"
_MOST_THREADS = 4096
_ARE_KEPT = (
    "program", "source", "protocol", "workers", "threads", "lookahead", "dropped", "nonfinite",
    "learning_rates", "init",
)  # fmt: skip
"""Fields of the header that must be the same after a resume."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """The result of a replay.

    Attributes:
        version: the number of updates recomputed.
        difference: the first difference, in words; empty if all is equal.
        is_model_equal: whether every bit of the parameters equals the run's model; None if the
            replay or the trace ended before the run did, or the run saved no model.
        metrics: means over the test data at ``version``; empty if there is no test data.
    """

    version: int
    pushes: int
    difference: str
    is_model_equal: bool | None
    metrics: Mapping[str, float]

    @property
    def is_equal(self) -> bool:
        return not self.difference and self.is_model_equal is not False

    def to_json(self) -> dict[str, object]:
        """The result of ``paceline replay --json``."""
        return {
            "version": self.version,
            "pushes": self.pushes,
            "is_equal": self.is_equal,
            "difference": self.difference or None,
            "is_model_equal": self.is_model_equal,
            "metrics": {
                name: value if math.isfinite(value) else None
                for name, value in self.metrics.items()
            },
        }


def replay(
    run_dir: Path,
    *,
    until: int | None = None,
    save: Path | None = None,
    on_progress: Callable[[int], None] = lambda version: None,
) -> Replayed:
    """Recompute a run from its trace.

    Args:
        until: stop after so many updates, and compare.
        save: where to save the model at that point (safetensors).

    Raises:
        ConfigError: the folder holds no run that can be replayed; the message says why.
    """
    if until is not None and until < 0:
        raise ConfigError(f"--until is a version, >= 0, got {until}")
    path = run_dir / FILE_NAME
    header, records = read_header(path), read_trace(path)
    _refuse(run_dir, header, read_trace(path), until)
    threads = max(1, header.number("threads", 1))
    if threads > _MOST_THREADS:
        raise contradiction(f"a worker computed with {threads} threads")
    work, run = _prepare(header, run_dir)
    difference = _first_difference(threads, lambda: run.run(records, until, on_progress))
    version = run.coordinator.version
    if until is not None and version < until and not difference:
        raise ConfigError(f"{run_dir} ended at version {version}; --until {until} is beyond it")
    totals = work.evaluate()
    work.load_newest()
    if save is not None:
        save_model(work.model, save)
    is_whole = not difference and _ended_at(run_dir) == version
    return Replayed(
        version=version,
        pushes=run.pushes,
        difference=difference,
        is_model_equal=_is_equal(work, run_dir / _MODEL) if is_whole else None,
        metrics={name: value / count for name, (value, count) in totals.items() if count},
    )


def _first_difference(threads: int, run: Callable[[], object]) -> str:
    """Replay with this number of threads; return the first difference, empty if there is none."""
    num_threads_before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        run()
    except Difference as error:
        return str(error)
    finally:
        torch.set_num_threads(num_threads_before)
    return ""


def _prepare(header: Header, run_dir: Path) -> tuple[PeersWork, RecordedRun]:
    """Return the work and the replay that the header describes."""
    spec = header.text("program").partition(" ")[2]
    workers = header.number("workers")
    protocol = parse(header.text("protocol"), workers)
    task = load_task(spec, workers, header.text("init") or None)
    batch_size = header.number("batch_size")
    if batch_size < 1:
        raise contradiction(f"its batch size is {batch_size}")
    nonfinite = header.text("nonfinite", "error")
    work = PeersWork(
        task,
        protocol,
        num_workers=workers,
        batch_size=batch_size,
        lr=_rate(header),
        seed=header.number("seed"),
        nonfinite=nonfinite,
    )
    _check_same(run_dir, header, work)
    ledger = Ledger(
        work.num_samples,
        batch_size,
        protocol.num_pushes,
        keep_remainder=not header.fields.get("drop_last"),
        dropped="skip" if header.text("dropped") == "skip" else "requeue",
    )
    work.follow(ledger.every_epoch)
    pulled = pulled_versions(read_trace(run_dir / FILE_NAME))
    coordinator = Coordinator(protocol, ledger)
    return work, RecordedRun(coordinator, work, pulled, header.number("lookahead"))


def _rate(header: Header) -> float | None:
    """Return the learning rate; None: the task's own. ConfigError: it is not a number."""
    rates = header.texts("learning_rates")
    try:
        return float(rates[0]) if rates else None
    except ValueError:
        raise contradiction(f"its learning rate is {rates[0]!r}") from None


def _check_same(run_dir: Path, header: Header, work: PeersWork) -> None:
    """Raise ConfigError if the data or the model are not those of the run."""
    expected: dict[str, tuple[Scalar, Scalar]] = {
        "samples": (header.number("num_samples"), work.num_samples),
        "parameters": (header.number("num_parameters"), work.replica.layout.num_parameters),
        "data": (header.text("source"), work.splits.source),
    }
    for what, (recorded, current) in expected.items():
        if recorded != current:
            raise ConfigError(
                f"{run_dir} cannot be replayed: {what} {recorded} then, {current} now; use the "
                "same data and the same code"
            )


def _ended_at(run_dir: Path) -> int | None:
    """The version at which the run ended; None: its trace was cut off before."""
    version, is_ended = 0, False
    for record in read_trace(run_dir / FILE_NAME):
        version += isinstance(record, Ordered) and isinstance(record.order, Apply)
        is_ended = isinstance(record, Ended)
    return version if is_ended else None


def _is_equal(work: PeersWork, path: Path) -> bool | None:
    """Whether the model equals the saved one in every bit; None if none was saved."""
    if not path.exists():
        return None
    saved, current = load_tensors(path), tensors_of(work.model)
    return saved.keys() == current.keys() and all(
        _are_same_bits(saved[name], value) for name, value in current.items()
    )


def _are_same_bits(first: Tensor, second: Tensor) -> bool:
    """Whether all bits are equal, also of NaN: a replay has the same ones as its run."""
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    first, second = (each.contiguous().view(-1).view(torch.uint8) for each in (first, second))
    return first.equal(second)


def _refuse(run_dir: Path, header: Header, records: Iterable[Record], until: int | None) -> None:
    """Raise ConfigError if the run cannot be replayed up to version ``until``.

    Args:
        until: None: to its end. Later records do not matter.
    """
    if reason := _reason(header):
        raise ConfigError(f"{run_dir} cannot be replayed: {reason}")
    for record in records:
        if not isinstance(record, Resumed) or (until is not None and record.version >= until):
            continue
        if reason := _resumed_reason(header, record):
            raise ConfigError(
                f"{run_dir} cannot be replayed beyond version {record.version}, where it was "
                f"resumed: {reason}; --until {record.version} replays it up to there"
            )


def _reason(header: Header) -> str:
    """Why a run with this header cannot be replayed; empty if it can."""
    program, device = header.text("program"), header.text("device")
    kind, _, name = program.partition(" ")
    if "program" not in header.fields:
        if header.text("engine", "") == "simulated":
            return "it simulated only time, without a task: no update was computed"
        return "its trace does not name what ran; it is from an older version of Paceline"
    if kind == "script":
        return f"it ran the script {name}, whose loop is not in the trace; run it again"
    if not name:
        return "its task was passed from Python and has no name to find it by"
    if header.text("split", ""):
        return "its model was split, and a replay computes the whole model in one process"
    if header.text("path") == "collective":
        return _summed_otherwise(header.text("collective", "native"))
    if not device.startswith("cpu"):
        return f"it ran on {device}, and only results of a CPU are equal bit for bit"
    if (number := header.number("accumulate", 1)) > 1:
        return f"it accumulated {number} batches per push, and a replay computes each push at once"
    if warmup := header.text("warmup"):
        return f"its learning rate was warmed up (--warmup {warmup}), and a replay uses one rate"
    if rounding := header.texts("rounding"):
        return f"it ran with {' and '.join(rounding)}, which rounds differently from plain code"
    return ""


def _summed_otherwise(collective: str) -> str:
    if collective == "native":
        return "its gradients were averaged by torch.distributed, in its own order"
    if collective == "shared":
        return "its ranks added up their shares of the gradients, each beginning with its own"
    return (
        f"its gradients were summed along {collective}, and a replay sums them as shared memory "
        "does, in another order"
    )


def _resumed_reason(header: Header, resumed: Resumed) -> str:
    """Why the part after a resume cannot be replayed; empty if it can."""
    changes = {"workers": resumed.workers, **resumed.changes}
    header_now = Header(fields={**header.fields, **changes})
    if reason := _reason(header_now):
        return reason
    for name in _ARE_KEPT:
        before, after = header.fields.get(name), header_now.fields.get(name)
        if before != after:
            field = name.replace("_", " ")
            return f"it continued with {field} {_word(after)} instead of {_word(before)}"
    if parse(header_now.text("protocol"), header_now.number("workers")).update_rule == "mean":
        return (
            f"it continued under {header_now.text('protocol')}, and the trace does not hold the "
            "state of each worker's own optimizer"
        )
    return ""


def _word(value: object) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)
