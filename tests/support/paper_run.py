"""One simulated run, from its plan to its judgement.

    ends         it ends, and raises only what a fault makes legal
    each once    each sample of an epoch that ended is in one version; of others in one at most
    nobody       healthy is ended
    kept         a stop keeps the version that it stops at before anybody hears of it

This module must not know how a member or the engine is made.
"""

import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Literal

from paceline.checkpoints.resumption import Origin
from paceline.config import RunSettings
from paceline.core.batches import Batches
from paceline.core.ledger import Ledger
from paceline.engines.base import MemberSpec
from paceline.errors import (
    AllGone,
    LinkError,
    PacelineError,
    ScriptLost,
    WorkerError,
)
from paceline.protocols import parse
from paceline.report.live import QuietObserver
from paceline.run.controller import Controller
from paceline.run.describe import Description
from paceline.store.memory import Memory
from paceline.trace import FILE_NAME, Trace
from paceline.wire.messages import Laid, Stop
from paper_engine import Fault, PaperEngine, PaperQueue
from paper_member import Script


class Silent:
    """The output of the main worker, which a simulation does not have."""

    def show(self) -> None:
        return

    def follow(self, seat: int) -> None:
        return


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One run with all its events.

    Attributes:
        own: scripts of seats that do something else than ``script``.
        interrupt_at: number of the turn at which the user asks for the end; 0: never.
    """

    protocol: str = "full-sync"
    workers: int = 2
    samples: int = 8
    batch: int = 4
    script: Script = field(default_factory=Script)
    own: tuple[tuple[int, Script], ...] = ()
    faults: tuple[Fault, ...] = ()
    choices: Sequence[int] = ()
    respawn: bool = False
    path: Literal["store", "peers"] = "store"
    interrupt_at: int = 0
    updates: int | None = None
    checkpoint_every: str = "2 updates"

    @property
    def description(self) -> str:
        """What each member describes."""
        one = Description(
            digest="", task="paper", source="", program="task paper", threads=1, device="cpu",
            num_parameters=1, update_bytes=4, arena_bytes=64, pinned_bytes=8,
            num_samples=self.samples, batch_size=self.batch, drop_last=False,
            has_own_batches=False, order="in order", lookahead=0, learning_rates=(0.1,),
            epochs=self.script.epochs, grain="", can_share=True, notes=(),
        )  # fmt: skip
        return json.dumps(one.write())

    @property
    def settings(self) -> RunSettings:
        return RunSettings(
            workers=self.workers, protocol=self.protocol, epochs=self.script.epochs, path=self.path,
            respawn=self.respawn, on_worker_error="continue", updates=self.updates,
            checkpoint_every=self.checkpoint_every, batch_size=self.batch,
        )  # fmt: skip


@dataclass(kw_only=True)
class Outcome:
    """The outcome of a plan."""

    plan: Plan
    engine: PaperEngine
    queue: PaperQueue | None
    error: PacelineError | KeyboardInterrupt | None
    version: int
    handlers: set[type]
    """What the controller hears."""
    said: str
    used: Counter[tuple[int, int]] = field(default_factory=Counter)
    """(epoch, position) -> versions that it is in."""


def specs(num_seats: int) -> list[MemberSpec]:
    """Specs of simulated members, which need none."""
    return [
        MemberSpec(
            member=seat, seat=seat, num_seats=num_seats, threads=1, log="", context={},
            environment={},
        )
        for seat in range(num_seats)
    ]  # fmt: skip


def carry_out(plan: Plan) -> Outcome:
    """Run a plan from start to end."""
    engine = make_engine(plan)
    outcome = conduct(plan, engine)
    for leases in engine.made:
        for lease in leases:
            outcome.used.update((lease.epoch, at) for at in range(lease.start, lease.stop))
    return outcome


def make_engine(plan: Plan, kind: type[PaperEngine] = PaperEngine) -> PaperEngine:
    """The engine of a plan."""
    parts = parse(plan.protocol, plan.workers).num_pushes
    return kind(
        plan.workers, plan.description, plan.script, Batches(plan.samples, plan.batch, parts),
        choices=plan.choices, faults=plan.faults, own=dict(plan.own),
    )  # fmt: skip


def conduct(plan: Plan, engine: PaperEngine) -> Outcome:
    """Let the controller conduct it."""
    queues: list[PaperQueue] = []
    words = StringIO()

    def make_queue(memory: Memory) -> PaperQueue:
        queues.append(PaperQueue(memory, engine.kept))
        return queues[-1]

    error: PacelineError | KeyboardInterrupt | None = None
    with (
        tempfile.TemporaryDirectory(prefix="paceline-paper-") as folder,
        closing(Trace(Path(folder) / FILE_NAME)) as trace,
    ):
        controller = Controller(
            engine, parse(plan.protocol, plan.workers), plan.settings, trace,
            QuietObserver(words), None, Silent(), Origin(about={}),
            clock=lambda: engine.now_s, make_queue=make_queue,
        )  # fmt: skip
        if plan.interrupt_at:
            engine.asked[plan.interrupt_at] = lambda: controller.interrupt("the user asked")
        try:
            controller.run(engine.start(specs(plan.workers), b""))
        except (PacelineError, KeyboardInterrupt) as raised:
            error = raised
        version = controller.version
        controller.close()
    return Outcome(
        plan=plan, engine=engine, queue=queues[0] if queues else None, error=error, version=version,
        handlers=set(controller._handlers), said=words.getvalue(),
    )  # fmt: skip


# -- contract --------------------------------------------------------------------------------------


def judge(outcome: Outcome) -> None:
    """Raise AssertionError if the contract is violated."""
    judge_end(outcome)
    judge_samples(outcome)
    judge_checkpoints(outcome)
    assert not outcome.engine.ended_acting, f"healthy members were ended\n{outcome.said}"


def judge_end(outcome: Outcome) -> None:
    """The run raises only errors that its faults allow, and otherwise ends."""
    engine, error, plan = outcome.engine, outcome.error, outcome.plan
    if error is None:
        counted = {number for number, one in engine.told if isinstance(one, Laid)}
        late = [number for number in counted if engine.members[number].is_alive]
        if "it is ended" in outcome.said and any(one.kind == "stop" for one in engine.happened):
            late = []  # members that stood still until the curfew
        assert all(engine.members[one].paper.turn.place == "end" for one in late), engine.describe()
        if late or any(member.has_ended for member in engine.members.values()):
            assert engine.version == outcome.version, "an update that was decided was not made"
        if not (plan.interrupt_at or plan.script.stops_at or plan.updates):
            ended = engine.ended_epochs
            num_ended = len(ended) if plan.script.breaks_at else plan.script.epochs
            assert ended == list(range(num_ended)), f"epochs {ended} ended\n{outcome.said}"
        return
    if isinstance(error, KeyboardInterrupt):
        assert plan.interrupt_at
        assert outcome.version < 0, "a run that had begun was not ended in order"
        return
    assert engine.happened, f"nothing had happened: {error}"
    if isinstance(error, ScriptLost):  # the main worker's, and all updates are made
        assert outcome.version >= 0, repr(error)
        return
    assert isinstance(error, WorkerError | LinkError), repr(error)
    if isinstance(error, LinkError) and any(one.kind == "stop" for one in engine.happened):
        return  # no member was left to copy the end within the curfew
    if outcome.version >= 0 and not isinstance(error, AllGone):
        assert not any(member.is_alive for member in engine.members.values()), repr(error)


def judge_samples(outcome: Outcome) -> None:
    """Each sample once in an epoch that ended, and at most once in any other."""
    plan, used = outcome.plan, outcome.used
    doubled = [one for one, times in used.items() if times > 1]
    assert not doubled, f"(epoch, sample) in two versions: {doubled}"
    if outcome.error is not None or plan.script.leaves_at:
        return
    if not any(member.is_alive or member.has_ended for member in outcome.engine.members.values()):
        return  # all died after a stop, and their state with them
    for epoch in outcome.engine.ended_epochs:
        lost = [at for at in range(plan.samples) if not used[epoch, at]]
        assert not lost, f"epoch {epoch} ended without samples {lost}"


def judge_checkpoints(outcome: Outcome) -> None:
    """A checkpoint has the version and the used samples that it states."""
    engine, queue, plan = outcome.engine, outcome.queue, outcome.plan
    if queue is None:
        return
    for number, version in enumerate(queue.versions):
        parts = parse(plan.protocol, plan.workers).num_pushes
        told = queue.used(number, Ledger(plan.samples, plan.batch, parts))
        epoch = max((one for one, _ in told), default=-1)
        held = {
            (lease.epoch, at)
            for leases in engine.made[:version]
            for lease in leases
            if lease.epoch == epoch
            for at in range(lease.start, lease.stop)
        }
        assert told == held, f"checkpoint of version {version}: {sorted(told ^ held)}"
    stops = [one for _, one in engine.told if isinstance(one, Stop)]
    is_on = plan.checkpoint_every != "never"
    if is_on and outcome.error is None and stops and outcome.version >= 0:
        assert stops[-1].version in queue.versions, f"stopped at {stops[-1]}, kept {queue.versions}"
