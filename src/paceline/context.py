"""What the launcher tells a member about the run, as data.

It is sent as JSON when the member is started, and read once by ``connect``. This module must not
know how it travels.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from .passes import START, ScriptPlace


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """One run, as a script needs it; the defaults are those of ``python train.py``.

    Attributes:
        parts: mini-batches that an update averages (the protocol's K).
        num_steps: local steps per push (local-sgd's H).
        is_difference: whether members push differences of parameters, which the store averages.
        split: how the model is divided, as given.
        outer: the optimizer that the store steps with on their mean, as given.
        fragments: in which they are pushed, one per update; ``overlap``: steps until it is merged.
        num_as_full_sync: first updates that equal full-sync's, where SGD steps locally.
        averages: whether an update may average several pushes.
        cancels: whether work in flight can be abandoned.
        is_spmd: whether all members do the same number of steps, in step with each other.
        steps_together: whether all members make each step together, each with the user's optimizer,
            on averaged gradients; a push is then a difference. `prepare` sets it.
        is_adaptive: whether ``parts`` and ``num_steps`` change during the run.
        program: the task or script that runs, as named; empty where it has no name.
        checkpoints: whether versions may be pinned, for which memory is laid out.
        checkpoints_inside: whether that is also done inside epochs, during the run.
        resume: folder of the checkpoint that the run resumes from.
        first_epoch: the first pass over the loader that the script makes.
        place: where the script is at that pass.
        run_identity: of the folder that ``run_dir`` named when the run began.
        delay, slow: the stragglers to simulate, as given.
        fault: the faults to inject, as given; in a worker's second life those that are left.
        respawn: whether workers may join later.
        own_batch_size: samples that the learning rate was chosen for; None: the loader's batch.
        is_own_process: whether an engine started this process for this worker alone.
        is_newcomer: whether this worker joins a run in progress.
        local_rank: the worker's number among those of its machine; None: all are on one.
        fast: ``auto``: measure how to compute; the eight settings after it choose by hand.
    """

    name: str = "script"
    program: str = ""
    seed: int = 0
    device: str = "auto"
    parts: int = 1
    num_steps: int = 1
    is_difference: bool = False
    outer: str = "none"
    fragments: int = 1
    overlap: int = 0
    num_as_full_sync: int = 0
    averages: bool = False
    cancels: bool = False
    is_spmd: bool = False
    is_adaptive: bool = False
    steps_together: bool = False
    nonfinite: str = "error"
    deterministic: bool = False
    path: str = "auto"
    compress: str = "none"
    split: str = "data"
    dry_run: bool = False
    workers: int = 1
    protocol: str = "full-sync"
    delay: tuple[str, ...] = ()
    slow: tuple[str, ...] = ()
    fault: tuple[str, ...] = ()
    is_newcomer: bool = False
    local_rank: int | None = None
    respawn: bool = False
    is_own_process: bool = False
    epochs: int | None = None
    batch_size: int | None = None
    mini_batch_size: int | None = None
    accumulate: int | None = None
    lr: float | None = None
    scale_lr: str = "none"
    warmup: str | None = None
    own_batch_size: int | None = None
    init: str | None = None
    run_dir: str | None = None
    run_identity: tuple[int, ...] | None = None
    keep_best: bool = False
    parameters: bool = False
    fast: str = "none"
    threads: int | None = None
    precision: str | None = None
    compile: str = "none"
    channels_last: bool = False
    keep_memory: str = "auto"
    fused_optimizer: bool = False
    loader_workers: int | None = None
    copies_ahead: bool = False
    checkpoints: bool = False
    checkpoints_inside: bool = False
    resume: str | None = None
    first_epoch: int = 0
    place: ScriptPlace = START
    source: str = "the script's own"
    notes: tuple[str, ...] = ()

    @property
    def steps_apart(self) -> bool:
        """Whether each ``step()`` of one of several optimizers is an update of all workers."""
        return self.is_spmd and not self.is_difference

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> "Context":
        names = {entry.name for entry in fields(cls)}
        known = {name: value for name, value in values.items() if name in names}
        for name in ("delay", "slow", "fault", "notes"):
            known[name] = tuple(known.get(name, ()))
        if known.get("run_identity") is not None:
            known["run_identity"] = tuple(known["run_identity"])
        if "place" in known:
            known["place"] = ScriptPlace.read(known["place"])
        return cls(**known)

    def write(self) -> dict[str, Any]:
        return asdict(self)
