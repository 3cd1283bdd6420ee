"""Whole runs on paper: every order of events, in milliseconds a run.

The contract is that of tests/faults, which holds it over real processes: see `paper_run`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple, get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.checkpoints.writer import Request
from paceline.engines import base
from paceline.errors import AllGone, ConfigError, LinkError, PacelineError, ScriptLost
from paceline.events import Grant, Lease, Ticket
from paceline.passes import START, ScriptPlace
from paceline.protocols import parse
from paceline.store.clip import UNCLIPPED
from paceline.wire import messages
from paceline.wire.codec import FROM_MEMBER
from paceline.wire.messages import FromMember, Job, ToMember
from paper_engine import Fault, PaperEngine, PaperQueue
from paper_member import PLACES, Script
from paper_run import Plan, carry_out, conduct, judge, make_engine

EXAMPLES = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
SPELLINGS = (
    "full-sync", "k-sync:1", "k-sync:2", "k-batch-sync:2", "async", "k-async:1", "k-async:2",
    "k-batch-async:2", "k-batch-async:3", "local-sgd:2", "post-local-sgd:2,2",
    "stale-synchronous:0", "stale-synchronous:1", "adaptive", "adaptive-local:2",
)  # fmt: skip

PEERS = ("full-sync", "local-sgd:2", "post-local-sgd:2,2")


def _fits(protocol: str, workers: int) -> bool:
    try:
        parse(protocol, workers)
    except PacelineError:
        return False
    return True


@st.composite
def plans(draw: st.DrawFn, *, is_calm: bool = False) -> Plan:
    """Any run of a few mini-batches with any events; calm: no fault, stop or early end."""
    workers = draw(st.integers(1, 5))
    protocol = draw(st.sampled_from([text for text in SPELLINGS if _fits(text, workers)]))
    parts = parse(protocol, workers).num_pushes
    epochs = draw(st.integers(1, 3))
    moment = st.tuples(st.integers(0, epochs - 1), st.integers(-1, 3))
    steps = st.lists(st.integers(0, 3), max_size=1).map(tuple)
    is_plain = not protocol.startswith(("local-sgd", "post-local", "adaptive-local"))
    script = Script(
        epochs=epochs,
        calls=tuple(draw(st.lists(st.sampled_from(("count", "sum")), max_size=2))),
        stops_at=draw(st.none() | moment) if not is_calm else None,
        leaves_at=draw(st.none() | moment) if not is_calm else None,
        breaks_at=draw(st.none() | st.tuples(st.integers(0, epochs - 1), st.integers(1, workers))),
        looks_at=draw(steps),
        extends_at=draw(steps) if is_plain else (),
        gives_back_at=draw(steps),
    )
    faults = st.builds(
        Fault,
        kind=st.sampled_from(("kill", "fail", "stop")),
        seat=st.integers(0, workers - 1),
        place=st.sampled_from(PLACES),
        nth=st.integers(0, 3),
        life=st.integers(0, 1),
        for_s=st.sampled_from((0.2, 2.0, 10.0)),
    )
    return Plan(
        protocol=protocol,
        workers=workers,
        samples=draw(st.integers(parts, 16)),
        batch=draw(st.integers(parts, parts + 5)),
        script=script,
        faults=tuple(draw(st.lists(faults, max_size=0 if is_calm else 4))),
        choices=draw(st.binary(max_size=300)),
        respawn=draw(st.booleans()),
        interrupt_at=draw(st.integers(0, 200)) if not is_calm else 0,
        updates=draw(st.none() | st.integers(1, 6)) if not is_calm else None,
        path=draw(st.sampled_from(("store", "peers"))) if protocol in PEERS else "store",
        checkpoint_every=draw(st.sampled_from(("never", "1 updates", "2 updates", "1 epoch"))),
    )


# -- what is heard ---------------------------------------------------------------------------------


def test_every_message_of_members_and_engines_has_a_handler() -> None:
    plan = Plan()
    heard = conduct(plan, make_engine(plan)).handlers
    assert heard == {*FROM_MEMBER.kinds, *get_args(base.Happening)}


# -- one run, message for message ------------------------------------------------------------------


class Line(NamedTuple):
    """A message of a member, and the messages to members that follow."""

    member: int
    hears: FromMember | base.Happening
    tells: Sequence[tuple[int, ToMember]] = ()


class Recital(PaperEngine):
    """Members send the messages of a list, and the replies are compared with it."""

    lines: Sequence[Line]
    _num_told = _num_heard = 0

    def events(self, timeout_s: float) -> list[base.Event]:
        self.check()
        self.num_done = sum(isinstance(message, Job) for _, message in self.told)
        line = self.lines[self._num_heard]
        self._num_heard += 1
        return [(line.member, line.hears)]

    def check(self) -> None:
        """The messages since the last line are those of the line."""
        told, self._num_told = self.told[self._num_told :], len(self.told)
        if self._num_heard:
            line = self.lines[self._num_heard - 1]
            assert told == list(line.tells), line


def _both(message: ToMember) -> list[tuple[int, ToMember]]:
    return [(0, message), (1, message)]


PLAN = Plan(protocol="full-sync", workers=2, samples=4, batch=4, checkpoint_every="never")
LAID = messages.Laid(
    arena_bytes=64, num_steps=1, is_difference=False, nonfinite_is_error=True, first_epoch=0,
    distance_limit=0.0, version=0, place=START, collective="",
)  # fmt: skip
IN, OVER = ScriptPlace(position=0), ScriptPlace(position=1, began=1)
ARRIVE, REST = messages.Arrive(0, None, None, "", IN), messages.Rested(1, OVER)
OPEN = messages.OpenEpoch(
    epoch=0, by_peers=False, updates_left=-1, phase=0, seats=(0, 1), began_for_s=0.0, newest=1
)
GRANTS = [
    Grant(Ticket(member=0, serial=0, version=0), (Lease(id=0, epoch=0, start=0, stop=2),)),
    Grant(Ticket(member=1, serial=0, version=0), (Lease(id=1, epoch=0, start=2, stop=4),)),
]
PUSH = messages.Push(
    0, 0, messages.Told(2, 1.0, messages.OK, 2.0), messages.Clocks(0.01), 0, UNCLIPPED
)
ADDS = [
    messages.Add(job=1, seat=0, weight=0.5, scale=1.0, is_first=True),
    messages.Add(job=2, seat=1, weight=0.5, scale=1.0, is_first=False),
]
FINISH = messages.Finish(job=3, version=1, seat=-1, scale=1.0, clip=UNCLIPPED)
EXIT = base.ProcessLeft("exit 0")
LINES = (
    Line(0, messages.Describe(PLAN.description)),
    Line(1, messages.Describe(PLAN.description), _both(LAID)),
    Line(1, ARRIVE),
    Line(0, ARRIVE, [*_both(OPEN), (0, GRANTS[0]), (1, GRANTS[1])]),
    Line(0, PUSH, [(0, ADDS[0])]),
    Line(1, PUSH, [(1, ADDS[1]), (1, FINISH), *_both(messages.EndEpoch(epoch=0, version=1))]),
    Line(1, messages.LoopLeft(version=1)),
    Line(1, REST),
    Line(0, messages.LoopLeft(version=1)),
    Line(0, REST, _both(messages.Goodbye())),
    Line(1, messages.Done()),
    Line(1, EXIT),
    Line(0, messages.Done()),
)
"""One epoch of two workers under full-sync: one update of four samples, two by each."""


def test_an_epoch_of_two_workers_message_by_message() -> None:
    engine = make_engine(PLAN, Recital)
    assert isinstance(engine, Recital)
    engine.lines = LINES
    outcome = conduct(PLAN, engine)
    engine.check()
    assert outcome.error is None
    assert outcome.version == 1


def _killed_at_the_end(*before: Line) -> BaseException | None:
    """The error of a run whose main worker dies after the last update and these lines."""
    engine = make_engine(PLAN, Recital)
    assert isinstance(engine, Recital)
    engine.lines = (
        *LINES[:6], *before,
        Line(0, base.ProcessLeft("killed by signal 9"), [(1, messages.BeMain())]),
        Line(1, messages.LoopLeft(version=1)), Line(1, REST, [(1, messages.Goodbye())]),
        Line(1, messages.Done()),
    )  # fmt: skip
    error = conduct(PLAN, engine).error
    engine.check()
    return error


def test_a_main_workers_death_after_the_last_update_may_lose_nothing() -> None:
    """Also where the others made the last update before its death was reported."""
    assert _killed_at_the_end() is None
    error = _killed_at_the_end(Line(0, messages.LoopLeft(version=1)))
    assert isinstance(error, ScriptLost)
    assert "worker 0 ended: killed by signal 9, after the last update" in str(error)


def test_an_end_that_cannot_be_written_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is refused while it is written, not before: the run ends with an error."""
    tried: list[Request] = []

    def refuse(queue: PaperQueue, request: Request, *, is_last: bool) -> None:
        tried.append(request)
        assert len(tried) < 10, "it is tried for ever"
        queue._answers.append({"failed": "no room"})

    monkeypatch.setattr(PaperQueue, "hand_in", refuse)
    outcome = carry_out(replace(PLAN, checkpoint_every="100 epochs"))
    assert [request["files"]["run.json"]["version"] for request in tried] == [1]
    assert isinstance(outcome.error, LinkError)
    assert "no room; it is in no checkpoint" in str(outcome.error)


@pytest.mark.parametrize("every", ["1 updates", "1 epoch"])
def test_a_stop_does_not_rely_on_a_checkpoint_still_being_written(
    every: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them fails in the end, and the run may stop at the version of the newest."""
    written: list[int] = []

    def take(queue: PaperQueue, request: Request, *, is_last: bool) -> None:
        if is_last:
            written.append(request["files"]["run.json"]["version"])
            queue._answers.append({"sealed": request["aside"], "took_s": 0.0})
        else:
            queue._pending.append(request)

    def fail(queue: PaperQueue) -> None:
        queue._answers += [{"failed": "no room"}] * len(queue._pending)
        queue._pending.clear()

    monkeypatch.setattr(PaperQueue, "hand_in", take)
    monkeypatch.setattr(PaperQueue, "finish", fail)
    plan = replace(PLAN, samples=8, script=Script(epochs=3), checkpoint_every=every)
    num_stopped = 0
    for turn in range(1, 100):
        written.clear()
        outcome = carry_out(replace(plan, interrupt_at=turn))
        if outcome.error is None and outcome.version >= 0:
            assert written == [outcome.version], f"interrupted at turn {turn}: {written}"
            num_stopped += outcome.version < 6
    assert num_stopped > 20


# -- any run ---------------------------------------------------------------------------------------


@EXAMPLES
@given(plan=plans(is_calm=True))
def test_without_faults_every_epoch_uses_each_sample_once(plan: Plan) -> None:
    outcome = carry_out(plan)
    assert outcome.error is None
    judge(outcome)


@EXAMPLES
@given(plan=plans())
def test_under_any_faults_the_run_ends_and_counts_each_sample_once(plan: Plan) -> None:
    judge(carry_out(plan))


@EXAMPLES
@given(plan=plans())
def test_under_any_faults_respawned_workers_continue_the_run(plan: Plan) -> None:
    judge(carry_out(replace(plan, respawn=True)))


# -- runs that did not end, each by the shortest plan that was found -------------------------------


def _choices(count: int, others: Mapping[int, int]) -> bytes:
    """This many choices: always the first that could continue, except for these."""
    return bytes(others.get(i, 0) for i in range(count))


FOUND = {
    "who waited for one that a stop has ended gets no time to go on": Plan(
        protocol="local-sgd:2", workers=3, samples=3, batch=3, path="peers", respawn=True,
        interrupt_at=23, checkpoint_every="never",
        faults=(Fault("stop", 0, "barrier", 0, 0, 10.0),),
    ),
    "the last worker dies with a job, after a stop": Plan(
        protocol="async", workers=1, samples=2, batch=1, interrupt_at=2,
        checkpoint_every="never", faults=(Fault("kill", 0, "job"),),
    ),
    "a newcomer arrives at the epoch that a stop ends, and all sum": Plan(
        samples=2, batch=2, script=Script(epochs=2, calls=("sum",)), respawn=True,
        interrupt_at=62, checkpoint_every="never", faults=(Fault("kill", 1, "arrive", nth=1),),
        choices=_choices(5, {4: 1}),
    ),
    "a newcomer arrives for an epoch that a stop keeps from opening, and all sum": Plan(
        workers=3, samples=6, batch=3, script=Script(epochs=2, calls=("sum",)), respawn=True,
        interrupt_at=83, checkpoint_every="never", faults=(Fault("kill", 1, "pushed", nth=1),),
        choices=_choices(95, {70: 2, 74: 1, 76: 1, 80: 143, 86: 1, 94: 1}),
    ),
    "a peer has copied before the round is heard after which it did": Plan(
        protocol="local-sgd:2", workers=3, samples=13, batch=3, script=Script(epochs=3),
        path="peers", checkpoint_every="1s",
        choices=_choices(95, {7: 1, 8: 1, 9: 1, 10: 1, 22: 47, 72: 159, 89: 15, 94: 1}),
    ),
    "who stands still is called off after peers have left, and another accumulates": Plan(
        samples=2, batch=2, script=Script(extends_at=(0,)), respawn=True, path="peers",
        checkpoint_every="never", faults=(Fault("stop", 0, "wait", nth=3),),
    ),
    "a peer dies in the round of the last update": Plan(
        protocol="local-sgd:2", workers=3, samples=14, batch=3, path="peers", updates=1,
        checkpoint_every="never", faults=(Fault("kill", 0, "barrier"),),
    ),
    "a user asks for the end in the round of the last update": Plan(
        workers=1, samples=2, batch=1, path="peers", updates=1, interrupt_at=2,
        checkpoint_every="1 updates",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_known_failing_plans_stay_fixed(name: str) -> None:
    outcome = carry_out(FOUND[name])
    assert outcome.engine.happened == list(FOUND[name].faults), "the fault did not come"
    assert not any("has not come to its end" in line for line in outcome.said.splitlines())
    judge(outcome)


BOTH_PATHS = pytest.mark.parametrize("path", ["store", "peers"])
BOTH_PLACES = pytest.mark.parametrize("sums", ["before", "after"])


@BOTH_PATHS
@BOTH_PLACES
def test_a_sum_for_a_dead_workers_batch_does_not_wait_forever(
    path: Literal["store", "peers"], sums: str
) -> None:
    """A worker with two mini-batches of an update sums twice; one with a single, once."""
    plan = Plan(
        workers=3, samples=24, batch=6, script=Script(epochs=2, sums=sums), path=path,
        faults=(Fault("kill", 2, "compute", nth=2),),
    )  # fmt: skip
    error = carry_out(plan).error
    assert isinstance(error, AllGone)
    assert "worker 2 ended: killed by signal 9; worker 0 waits for worker 1 in pace.sum()" in str(
        error
    )
    outcome = carry_out(replace(plan, workers=2))  # a lone worker waits for no other
    assert outcome.error is None
    judge(outcome)


@BOTH_PATHS
@pytest.mark.parametrize(
    ("sums", "own"),
    [
        ("before", Script()),
        ("after", Script()),
        ("before", Script(sums="before", leaves_at=(0, 1))),
    ],
)
def test_a_sum_in_the_loop_that_one_worker_never_reaches_is_refused(
    path: Literal["store", "peers"], sums: str, own: Script
) -> None:
    plan = Plan(samples=16, script=Script(sums=sums), own=((1, own),), path=path)
    error = carry_out(plan).error
    assert isinstance(error, ConfigError)
    assert "worker 0 waits for worker 1 in pace.sum() inside the loader's loop" in str(error)


@EXAMPLES
@given(plan=plans(), protocol=st.sampled_from(PEERS), sums=st.sampled_from(("before", "after")))
def test_under_any_faults_no_sum_in_the_loop_waits_forever(
    plan: Plan, protocol: str, sums: str
) -> None:
    script = Script(epochs=plan.script.epochs, calls=plan.script.calls, sums=sums)
    batch = 2 * plan.workers
    judge(carry_out(replace(
        plan, protocol=protocol, script=script, batch=batch, samples=3 * batch,
    )))  # fmt: skip


@pytest.mark.parametrize("nth", range(6))
def test_peers_do_not_pin_a_checkpoint_that_the_store_has_pinned(nth: int) -> None:
    """Its writer still reads it when all are peers again."""
    outcome = carry_out(Plan(
        samples=24, script=Script(epochs=3), path="peers", respawn=True,
        checkpoint_every="4 updates", faults=(Fault("kill", 1, "barrier", nth=nth),),
    ))  # fmt: skip
    assert outcome.error is None
    assert len(outcome.engine.kept) == 4
    judge(outcome)


DIFFERENT = {
    "one sums": (Script(calls=("sum",)), "has no more and worker 0 waits in pace.sum()"),
    "one evaluates": (Script(calls=("count",)), "has no more and worker 0 waits in pace.evaluate"),
    "one has an epoch more": (Script(epochs=2), "begins another epoch and worker 1 has no more"),
}


def test_a_lone_worker_stopped_until_the_deadline_is_ended() -> None:
    outcome = carry_out(Plan(
        protocol="local-sgd:2", workers=1, samples=1, batch=1, respawn=True, path="peers",
        interrupt_at=106, checkpoint_every="never",
        faults=(Fault("stop", 0, "laid", for_s=10.0), Fault("stop", 0, "barrier", for_s=10.0)),
    ))  # fmt: skip
    judge(outcome)
    assert "it is at barrier; it is ended" in outcome.said


@pytest.mark.parametrize("protocol", ["full-sync", "async"])
@pytest.mark.parametrize("what", DIFFERENT)
def test_workers_that_wait_for_different_things_are_reported(what: str, protocol: str) -> None:
    script, words = DIFFERENT[what]
    outcome = carry_out(Plan(protocol=protocol, own=((0, script),)))
    assert isinstance(outcome.error, ConfigError)
    assert words in str(outcome.error)


@pytest.mark.parametrize("place", ["rest", "between"])
def test_workers_left_waiting_for_different_things_are_reported(place: str) -> None:
    """The other two wait for different things as soon as the third is gone."""
    for choices in ((), *(bytes((i * 7 + j) % 15 for j in range(80)) for i in range(6))):
        plan = Plan(
            workers=3, samples=6, batch=3, own=((1, Script(epochs=2)),), choices=choices,
            faults=(Fault("kill", 2, place),),
        )  # fmt: skip
        assert "begins another epoch and worker 0 has no more" in str(carry_out(plan).error)


@pytest.mark.parametrize("place", ["between", "arrive"])
def test_another_worker_becomes_main_when_the_main_script_ends(place: str) -> None:
    plan = Plan(samples=12, script=Script(epochs=3), faults=(Fault("exit", 0, place, nth=1),))
    outcome = carry_out(plan)
    assert (1, messages.BeMain()) in outcome.engine.told
    assert outcome.error is None


def test_a_finished_worker_makes_no_other_worker_main() -> None:
    """Its last output was printed and must not be printed again."""
    outcome = carry_out(Plan(script=Script(epochs=2)))
    assert not any(isinstance(message, messages.BeMain) for _, message in outcome.engine.told)
