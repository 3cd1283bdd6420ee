"""The replay of a run from its folder is bitwise equal; differences are named."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import tiny
from dying import Fault, with_fault
from paceline.checkpoints.folder import CheckpointFolder
from paceline.checkpoints.resumption import adopt
from paceline.config import resolve
from paceline.errors import ConfigError
from paceline.events import Late
from paceline.launch.launcher import launch_run
from paceline.program import TaskProgram
from paceline.replay import replay
from paceline.report.live import QuietObserver
from paceline.trace import FILE_NAME
from paceline.trace.records import Handed, Resumed, Scaled
from resealing import reseal
from runs import Run, _launch, run_script, train

PROTOCOLS = (
    "full-sync", "k-sync:2", "k-batch-sync:4", "async", "k-async:2", "k-batch-async:4",
    "stale-synchronous:1", "local-sgd:2", "local-sgd:2+nesterov:0.7,0.9", "adaptive",
    "local-sgd:4+nesterov:0.7,0.9+fragments:2",
)  # fmt: skip


def run(folder: Path, task: str = "tiny:WITH_BATCH_NORM", **settings: Any) -> Run:
    chosen = {"workers": 3, "protocol": "async", **settings}
    return _launch(TaskProgram(task=task), folder, chosen)


@pytest.mark.parametrize("task", ["WITH_BATCH_NORM", "LAYERS"])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_replay_of_a_live_run_is_bitwise_equal(tmp_path: Path, protocol: str, task: str) -> None:
    """Push by push if the model keeps statistics, otherwise in rows."""
    live = run(tmp_path, f"tiny:{task}", protocol=protocol, delay=("exp:2ms",), slow=("0=2x",))
    result = replay(live.folder)
    assert result.difference == ""
    assert result.is_model_equal is True
    assert result.version == live.summary.updates
    assert result.pushes == sum(1 for record in live.records if type(record).__name__ == "Handed")


@pytest.mark.parametrize(
    "settings",
    [
        {"path": "store"},
        {"path": "store", "batch_size": 16},
        {"path": "peers", "workers": 2},
        {"path": "peers", "protocol": "post-local-sgd:3,2"},
        {"path": "peers", "protocol": "local-sgd:6+fragments:3"},
        {"path": "peers", "batch_size": 16},
        {"path": "peers", "workers": 4, "batch_size": 16},
        {"engine": "inline"},
        {"protocol": "k-sync:2", "dropped": "skip"},
        {"workers": 1},
    ],
)
@pytest.mark.parametrize("task", ["WITH_BATCH_NORM", "LAYERS"])
def test_replay_is_equal_on_every_path(tmp_path: Path, task: str, settings: dict[str, Any]) -> None:
    """Incomplete updates at the end of an epoch are rounded differently between peers."""
    live = run(tmp_path, f"tiny:{task}", **{"protocol": "full-sync", **settings})
    result = replay(live.folder)
    assert (result.difference, result.is_model_equal) == ("", True)


def test_replay_of_a_compiled_model_is_equal(tmp_path: Path) -> None:
    """Its file has the names of the original module, and only tensors."""
    live = run(tmp_path, "tiny:COMPILED", engine="inline", updates=4)
    assert set(live.state) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    result = replay(live.folder)
    assert (result.difference, result.is_model_equal) == ("", True)


@pytest.mark.parametrize(
    ("protocol", "rule"),
    [
        ("async", "drop:1"),
        ("async", "inverse"),
        ("k-async:2", "inverse"),
        ("k-async:2", "distance:0.00123456789"),
    ],
)
def test_replay_under_a_staleness_rule_is_equal(tmp_path: Path, protocol: str, rule: str) -> None:
    live = run(tmp_path, protocol=protocol, staleness=rule, slow=("0=3x",), engine="inline")
    result = replay(live.folder)
    assert (result.difference, result.is_model_equal) == ("", True)
    _edit(live, '"kind": ?"run"', lambda one: one.update(protocol=protocol), 0)
    assert not replay(live.folder).is_equal


@pytest.mark.parametrize("task", ["WITH_BATCH_NORM", "LAYERS"])
def test_replay_under_the_distance_rule_is_equal(tmp_path: Path, task: str) -> None:
    live = run(tmp_path, f"tiny:{task}", staleness="distance:0.002", delay=("exp:5ms",))
    result = replay(live.folder)
    assert (result.difference, result.is_model_equal) == ("", True)
    assert [record for record in live.records if isinstance(record, Scaled) and record.scale < 1.0]
    _edit(live, '"scaled"', lambda one: one.update(scale=one["scale"] / 2), 2)
    assert re.match(r"by push \d+: distance left \S+ of the push of member \d at version \d+, "
                    r"now \S+$", replay(live.folder).difference)  # fmt: skip


# -- resumed runs ----------------------------------------------------------------------------------


def resumed(
    folder: Path,
    cuts: Sequence[int],
    last: Mapping[str, Any],
    task: str = "WITH_BATCH_NORM",
    **settings: Any,
) -> Run:
    """A run that was stopped after each of these numbers of updates and resumed."""
    program = TaskProgram(task=f"tiny:{task}")
    chosen = {"workers": 3, "threads": 1, "device": "cpu", "engine": "inline", **settings}
    chosen["run_dir"] = str(folder / "run")
    for cut in (*cuts, 10**6):
        more = last if cut == 10**6 else {}
        flags = resolve({**chosen, **more, "updates": cut}, env={}, is_call=True)
        summary = launch_run(program, adopt(flags), QuietObserver())
        chosen = {"resume": str(folder / "run"), "device": "cpu"}
    assert summary is not None
    return Run(folder=folder / "run", summary=summary)


@pytest.mark.parametrize("cuts", [[3], [5], [3, 4], [2, 8]], ids=str)
@pytest.mark.parametrize("protocol", ["async", "full-sync", "k-batch-sync:2", "adaptive"])
@pytest.mark.parametrize("task", ["WITH_BATCH_NORM", "LAYERS"])
def test_replay_of_a_resumed_run_is_equal(
    tmp_path: Path, protocol: str, cuts: list[int], task: str
) -> None:
    """Stopped within an epoch or at its end; once or twice."""
    live = resumed(tmp_path, cuts, {}, task, protocol=protocol)
    assert len([record for record in live.records if isinstance(record, Resumed)]) == len(cuts)
    result = replay(live.folder)
    assert (result.difference, result.is_model_equal) == ("", True)
    assert result.version == live.summary.updates


def test_replay_of_a_resumed_run_between_peers_is_equal(tmp_path: Path) -> None:
    live = resumed(tmp_path, [3], {}, engine="local", workers=2, path="peers")
    result = replay(live.folder)
    assert (result.difference, result.is_model_equal) == ("", True)


def test_replay_of_a_run_resumed_in_flight_is_equal(tmp_path: Path) -> None:
    """Work after the checkpoint is lost, and work then in flight is free again."""
    every = {"protocol": "async", "checkpoint_every": "2 updates", "keep": 100}
    live = resumed(tmp_path, [], {}, **every, engine="local", workers=2, delay=("250ms",))
    checkpoints = live.folder / "checkpoints"
    numbers = sorted(int(path.name) for path in checkpoints.iterdir() if path.name.isdigit())
    versions = {
        one: CheckpointFolder(checkpoints).check(one).json("run.json")["version"] for one in numbers
    }
    inside = next(one for one, version in versions.items() if version % 5)  # an epoch
    for number in numbers:
        if number > inside:
            (checkpoints / str(number) / "manifest.json").unlink()
    (checkpoints / "latest").unlink()
    live = _resume(live)
    (again,) = [record for record in live.records if isinstance(record, Resumed)]
    assert again.lost > 0
    result = replay(live.folder)
    assert (result.difference, result.is_model_equal) == ("", True)


def _resume(live: Run) -> Run:
    flags = resolve({"resume": str(live.folder), "device": "cpu"}, env={}, is_call=True)
    summary = launch_run(TaskProgram(task="tiny:WITH_BATCH_NORM"), adopt(flags), QuietObserver())
    assert summary is not None
    return Run(folder=live.folder, summary=summary)


@pytest.mark.parametrize(
    ("settings", "last", "words"),
    [
        ({"protocol": "async"}, {"workers": 2}, "it continued with workers 2 instead of 3"),
        ({}, {"protocol": "async"}, "it continued with protocol async instead of full-sync"),
        (
            {"protocol": "local-sgd:2"},
            {},
            "it continued under local-sgd:2, and the trace does not hold the state of each worker",
        ),
    ],
)
def test_unreplayable_resume_is_refused_by_name(
    tmp_path: Path, settings: dict[str, Any], last: dict[str, Any], words: str
) -> None:
    live = resumed(tmp_path, [3], last, **settings)
    with pytest.raises(ConfigError, match=rf"beyond version 3, where it was resumed: {words}.*"
                       r"; --until 3 replays it up to there$"):  # fmt: skip
        replay(live.folder)
    result = replay(live.folder, until=3)
    assert (result.version, result.difference) == (3, "")


# -- differences -----------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["full-sync", "k-async:2"])
@pytest.mark.parametrize("name", ["WITH_BATCH_NORM", "LAYERS"])
def test_replay_of_a_run_with_killed_workers_is_equal(
    tmp_path: Path, name: str, protocol: str
) -> None:
    """Peers continue through the store, and the remaining workers do all the work."""
    task = with_fault(getattr(tiny, name), Fault(call=4))
    live = train(task, tmp_path, workers=3, protocol=protocol)
    assert live.left == ["killed by signal 9"]
    header = '"kind": ?"run"'
    _edit(live, header, lambda one: one.update(program=f"task tiny:{name}"), 0)
    result = replay(live.folder)
    assert (result.difference, result.is_model_equal) == ("", True)


def test_stopped_run_is_replayed_to_its_end(tmp_path: Path) -> None:
    live = run(tmp_path, updates=7)
    result = replay(live.folder)
    assert (result.version, result.is_model_equal, result.difference) == (7, True, "")


def test_truncated_trace_is_equal_as_far_as_it_goes(tmp_path: Path) -> None:
    """Cut after each of its last lines, so also between a push and its consequences."""
    live = run(tmp_path, workers=2, updates=3)
    lines = (live.folder / FILE_NAME).read_text().splitlines(keepends=True)
    pushed = max(i for i, line in enumerate(lines) if re.search('"kind": ?"pushed"', line))
    for number in range(pushed - 1, len(lines)):
        (live.folder / FILE_NAME).write_text("".join(lines[:number]))
        result = replay(live.folder)
        assert (result.difference, result.is_model_equal, result.is_equal) == ("", None, True)


def test_replay_can_stop_at_any_version(tmp_path: Path) -> None:
    live = run(tmp_path, protocol="k-async:2")
    seen = [replay(live.folder, until=version, save=tmp_path / f"{version}.safetensors")
            for version in (0, 3, live.summary.updates)]  # fmt: skip
    assert [one.version for one in seen] == [0, 3, live.summary.updates]
    assert [one.is_model_equal for one in seen] == [None, None, True]
    saved = [load_file(tmp_path / f"{one.version}.safetensors") for one in seen]
    assert not saved[0]["out.weight"].equal(saved[1]["out.weight"])
    assert saved[2]["out.weight"].equal(live.state["out.weight"])
    with pytest.raises(ConfigError, match=r"ended at version \d+; --until 999 is beyond it"):
        replay(live.folder, until=999)


def _edit(live: Run, pattern: str, change: Any, number: int) -> None:
    """Change the ``number``-th line of the trace that matches."""
    path = live.folder / FILE_NAME
    lines = path.read_text().splitlines(keepends=True)
    chosen = [i for i, line in enumerate(lines) if re.search(pattern, line)][number]
    fields = json.loads(lines[chosen])
    change(fields)
    lines[chosen] = json.dumps(fields) + "\n"
    path.write_text(reseal("".join(lines)))


def _late_and_others(live: Run) -> tuple[list[int], list[int]]:
    """The indices of late pushes, and of pushes that counted."""
    late = {one.ticket[:2] for one in live.every_order() if isinstance(one, Late)}
    pushed = [record.fact.ticket[:2] for record in live.records if isinstance(record, Handed)]
    places = range(len(pushed))
    return ([i for i in places if pushed[i] in late], [i for i in places if pushed[i] not in late])


def test_first_differing_loss_is_named(tmp_path: Path) -> None:
    live = run(tmp_path, engine="inline")
    _, counted = _late_and_others(live)
    for number in (counted[8], counted[5]):
        _edit(live, '"pushed"', lambda one: one.update(loss=one["loss"] + 1e-9), number)
    result = replay(live.folder)
    assert re.match(
        rf"push {counted[5] + 1} \(member \d, of version \d+, when the newest was \d+\): "
        r"loss \S+ recorded, \S+ now",
        result.difference,
    )
    assert not result.is_equal


def test_loss_of_every_applied_push_is_compared(tmp_path: Path) -> None:
    live = run(tmp_path, engine="inline", protocol="k-async:2")
    path = live.folder / FILE_NAME
    whole = path.read_text()
    _, counted = _late_and_others(live)
    for place in counted:
        _edit(live, '"pushed"', lambda one: one.update(loss=one["loss"] + 1e-9), place)
        assert replay(live.folder).difference.startswith(f"push {place + 1} (")
        path.write_text(whole)


def test_late_push_is_not_replayed(tmp_path: Path) -> None:
    """Another worker won its mini-batch, as at the end of an epoch: its loss is in no update."""
    live = run(tmp_path, engine="inline", protocol="k-sync:2")
    _beaten_push_arrives(live)
    late, _ = _late_and_others(live)
    assert late
    result = replay(live.folder)
    assert (result.difference, result.is_model_equal) == ("", True)


def _beaten_push_arrives(live: Run) -> None:
    """Let the first cancelled push arrive after that update."""
    path = live.folder / FILE_NAME
    lines = path.read_text().splitlines(keepends=True)
    rows = [json.loads(line) for line in lines]
    at = next(i for i, row in enumerate(rows) if row["kind"] == "cancel")
    mine = [row for row in rows[:at] if row["kind"] == "grant"]
    ticket = [row["ticket"] for row in mine if row["ticket"][0] == rows[at]["member"]][-1]
    after = next(i for i in range(at, len(rows)) if rows[i]["kind"] == "pushed")
    pushed = {**rows[after], "ticket": ticket, "loss": 123.0}
    late = {"kind": "late", "t": pushed["t"], "ticket": ticket}
    lines[after:after] = [json.dumps(pushed) + "\n", json.dumps(late) + "\n"]
    path.write_text(reseal("".join(lines)))


def test_first_differing_decision_is_named(tmp_path: Path) -> None:
    live = run(tmp_path)

    def other_lease(fields: dict[str, Any]) -> None:
        fields["leases"][0][2:] = [1, 13]

    _edit(live, '"grant"', other_lease, 6)
    difference = replay(live.folder).difference
    assert "work for member" in difference
    assert "(samples 1-13); the replay decided work for member" in difference


def test_differing_decision_without_tickets_is_named(tmp_path: Path) -> None:
    live = run(tmp_path)
    _edit(live, '"apply"', lambda fields: fields.update(tickets=[], weights=[]), 2)
    assert "the run decided apply of []; the replay decided apply of [(" in (
        replay(live.folder).difference
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch_size": 0}, "its batch size is 0"),
        ({"learning_rates": ["fast"]}, "its learning rate is 'fast'"),
    ],
)
def test_inconsistent_header_is_refused(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    live = run(tmp_path, engine="inline", updates=2)
    _edit(live, '"kind": ?"run"', lambda fields: fields.update(changes), 0)
    with pytest.raises(ConfigError, match=f"the trace contradicts itself: {words}"):
        replay(live.folder)


def test_model_changed_afterwards_is_detected(tmp_path: Path) -> None:
    live = run(tmp_path)
    state = live.state
    state["out.weight"][0, 0] += 1e-12
    save_file(state, live.folder / "model.safetensors")
    result = replay(live.folder)
    assert (result.difference, result.is_model_equal, result.is_equal) == ("", False, False)


def test_equal_nan_values_compare_equal(tmp_path: Path) -> None:
    live = run(tmp_path, "tiny:UNKNOWN", updates=3)
    assert live.state["spread"].isnan().all()
    assert replay(live.folder).is_model_equal is True


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"fused_optimizer": True}, "fused optimizer"),
        ({"precision": "bf16"}, "bf16"),
        ({"precision": "bf16", "channels_last": True}, "bf16 and channels last"),
    ],
)
def test_settings_that_round_differently_are_refused_by_name(
    tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    live = run(tmp_path, engine="inline", updates=2, **settings)
    with pytest.raises(ConfigError, match=f"it ran with {words}, which rounds differently"):
        replay(live.folder)


@pytest.mark.parametrize("settings", [{"precision": "fp32"}, {"loader_workers": 1}], ids=str)
def test_settings_that_keep_every_bit_are_replayed(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    result = replay(run(tmp_path, engine="inline", updates=4, **settings).folder)
    assert (result.difference, result.is_model_equal) == ("", True)


@pytest.mark.parametrize(
    ("collective", "words"),
    [
        ("native", r"averaged by torch\.distributed, in its own order"),
        ("ring", "summed along ring, and a replay sums them as shared memory does"),
    ],
)
def test_average_by_a_collective_is_refused_on_a_cpu(
    tmp_path: Path, collective: str, words: str
) -> None:
    """It sums in its own order: with three workers not that of the members."""
    live = run(tmp_path, protocol="full-sync", collective=collective)
    assert live.path == "collective"
    with pytest.raises(ConfigError, match=words):
        replay(live.folder)


def test_unreplayable_run_gives_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trace .* cannot be read"):
        replay(tmp_path)
    live = run(tmp_path / "run")
    _edit(live, '"kind": ?"run"', lambda one: one.update(num_samples=61), 0)
    with pytest.raises(ConfigError, match="samples 61 then, 60 now"):
        replay(live.folder)
    _edit(live, '"kind": ?"run"', lambda one: one.update(split="network:2: a | b"), 0)
    with pytest.raises(ConfigError, match="its model was split"):
        replay(live.folder)
    script = Path(__file__).parent / "support" / "loops.py"
    other = run_script(script, tmp_path / "script", "summing", str(tmp_path), workers=2)
    with pytest.raises(ConfigError, match=r"it ran the script .*loops.py.*run it again"):
        replay(other.folder)
