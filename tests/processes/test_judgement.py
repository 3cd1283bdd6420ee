"""Judgements on recorded processes: which train, for which job, are ghosts, and may be ended."""

from dataclasses import replace

import pytest

from paceline.processes.judgement import (
    Condition,
    Role,
    ghosts,
    has_lost_parent,
    judge,
    role_of,
)
from paceline.processes.snapshot import Process, ProcessSnapshot
from paceline.processes.targets import choose

PYTHON, OWNER, HERE, LOOK_S = "/usr/bin/python3.11", 1000, "pid:[1]", 1.0
INIT = Process(
    pid=1, start_ticks=1, parent=0, owner=0, namespace=HERE, name="systemd", exe="/sbin/init",
    command=("/sbin/init",),
)  # fmt: skip
SHELL = Process(
    pid=50, start_ticks=50, parent=1, owner=OWNER, group=50, session=50, namespace=HERE,
    name="bash", exe="/bin/bash", command=("-bash",),
)  # fmt: skip
LOOKER = Process(
    pid=60, start_ticks=9000, parent=50, owner=OWNER, group=60, session=50, namespace=HERE,
    name="paceline", exe=PYTHON, command=("python", "-m", "paceline", "ps"), has_torch=True,
)  # fmt: skip
TRAINS = ("python", "train.py", "--lr", "0.1")
SPAWN = ("python", "-c", "from multiprocessing.spawn import spawn_main; spawn_main()")


def process(pid: int, parent: int = 1, **changed: object) -> Process:
    """A training script that waits; process numbers rise in order of start."""
    usual: dict[str, object] = {
        "pid": pid, "start_ticks": pid, "parent": parent, "owner": OWNER, "group": pid,
        "session": 50, "namespace": HERE, "name": "python", "command": TRAINS, "exe": PYTHON,
        "has_torch": True, "used_s": 0.0, "age_s": 100.0,
    }  # fmt: skip
    return Process(**{**usual, **changed})  # type: ignore[arg-type]


def snapshot_of(*processes: Process, leaderless: bool = False) -> ProcessSnapshot:
    shells = () if leaderless else (SHELL,)
    return ProcessSnapshot(
        processes=(INIT, *shells, LOOKER, *processes), own=60, owner=OWNER, namespace=HERE
    )


def ghost_pids(snapshot: ProcessSnapshot) -> set[int]:
    return {pid for pid, _ in ghosts(snapshot, LOOK_S)}


LOADER = {"is_forked": True, "name": "pt_data_worker", "group": 100}
RANK = {"rank_s": 0.02, "session": 101}
SERVER = ("python", "-m", "paceline.engines.local.forkserver", "4")

ORPHANS = {
    "loader worker": process(101, **LOADER),
    "loader worker at work": process(101, **LOADER, used_s=0.9),
    "loader worker, spawned": process(101, command=SPAWN, name="pt_data_worker"),
    "loader worker of a notebook": process(
        101, **LOADER, command=("python", "-m", "ipykernel_launcher")
    ),
    "loader worker in a container, adopted by init of its own Python": process(
        101, parent=2, **LOADER
    ),
    "spawned part": process(101, command=SPAWN),
    "compiler": process(101, command=("python", "/v/torch/_inductor/compile_worker/__main__.py")),
    "rank": process(101, **RANK),
    "rank that spins": process(101, **RANK, used_s=1.0),
    "rank of --no-python": process(101, **RANK, exe="/opt/train", command=("/opt/train", "a.yaml")),
    "rank of a module": process(101, **RANK, command=("python", "-u", "-m", "pkg.train")),
    "rank of paceline train --nodes": process(
        101, **RANK, command=("python", "-u", "-m", "paceline", "train", "lenet")
    ),
    "fork server": process(101, command=SERVER, session=101),
    "worker of a run, at work": process(101, is_forked=True, command=SERVER, used_s=1.0),
    "forked, stopped": process(101, is_forked=True, group=100, state="T", used_s=None),
    "forked, idle": process(101, is_forked=True, group=100),
    "forked twice, in a session of its own, with a broken pipe": process(
        101, is_forked=True, group=99, session=99, dead_pipes=1
    ),
    "ignores TERM": process(101, **LOADER),
}


@pytest.mark.parametrize("orphan", ORPHANS.values(), ids=[*ORPHANS])
def test_dependent_process_without_its_parent_is_a_ghost(orphan: Process) -> None:
    reaper = process(2, parent=1, command=("python", "/init.py"), has_torch=False)
    snapshot = snapshot_of(reaper, orphan)
    assert ghost_pids(snapshot) == {101}
    assert [one.pid for one, _ in choose(snapshot, for_s=LOOK_S).targets] == [101]
    judged = {one.process.pid: one for one in judge(snapshot, LOOK_S)}
    assert judged[101].condition is Condition.GHOST
    assert not judged[101].is_parent_alive
    assert judged[101].reason


SCRIPT = process(100, parent=50)
BYSTANDERS = {
    "a script": process(101, parent=50),
    "a script under nohup, whose terminal is gone": process(101),
    "a script under nohup that is idle": process(101, used_s=0.0, age_s=9e5),
    "a script that is stopped": process(101, state="T"),
    "a notebook whose server is gone": process(101, command=("python", "-m", "ipykernel_launcher")),
    "a process forked in a notebook": process(
        101, is_forked=True, command=("python", "-m", "ipykernel_launcher", "-f", "k.json")
    ),
    "a loader worker whose script lives": process(101, parent=100, **LOADER),
    "a spawned part whose script lives": process(101, parent=100, command=SPAWN),
    "a rank whose torchrun lives": process(101, parent=100, **RANK),
    "a fork server whose launcher lives": process(101, parent=100, command=SERVER),
    "a forked part at work, adopted": process(101, is_forked=True, group=100, used_s=0.5),
    "a forked part that was looked at once": process(101, is_forked=True, used_s=None),
    "a server that was forked": process(101, is_forked=True, group=100, ports=(8000,)),
    "a daemon": process(101, is_forked=True, group=99, session=99),
    "a daemon that leads its session": process(101, is_forked=True, group=101, session=101),
    "a program begun by a rank": process(101, rank_s=0.5, command=("python", "serve.py")),
    "a program begun by a rank, detached": process(
        101, **{**RANK, "rank_s": 9.0}, command=("python", "-u", "evaluate.py")
    ),
    "a program begun by a rank, detached, at work": process(
        101, **{**RANK, "rank_s": 9e4}, command=("python", "evaluate.py"), used_s=1.0
    ),
    "a detached program of a run whose folder is gone": process(
        101, **{**RANK, "rank_s": None}, command=("python", "evaluate.py")
    ),
    "a shell": process(101, exe="/bin/bash", command=("bash",), has_torch=False),
    "Python without torch": process(101, has_torch=False),
    "multiprocessing without torch": process(101, has_torch=False, command=SPAWN),
    "a forked Python without torch": process(101, has_torch=False, is_forked=True),
    "a browser on the device": process(
        101, has_torch=False, exe="/usr/lib/firefox", devices=("/dev/nvidia0",)
    ),
    "a loader worker by name only": process(101, is_forked=True, name="pt_data_worker",
                                            has_torch=False),
    "another user's loader worker": process(101, **LOADER, owner=1001),
    "root's loader worker": process(101, **LOADER, owner=0),
    "a container's loader worker": process(101, **LOADER, namespace="pid:[2]"),
    "a loader worker that may not be read": process(101, **LOADER, namespace=""),
    "a script begun by a dead script": process(101, command=("python", "evaluate.py")),
    "an MPI daemon": process(101, exe="/usr/bin/orted", command=("orted",), has_torch=False),
    "TensorBoard": process(101, command=("python", "tensorboard", "--logdir", "x"),
                           has_torch=False),
    "a screen": process(101, exe="/usr/bin/Xorg", has_torch=False, devices=("/dev/nvidia0",)),
}  # fmt: skip


def test_at_least_thirty_bystanders_are_covered() -> None:
    assert len(BYSTANDERS) >= 30


@pytest.mark.parametrize("bystander", BYSTANDERS.values(), ids=[*BYSTANDERS])
def test_bystander_is_not_ended(bystander: Process) -> None:
    snapshot = snapshot_of(SCRIPT, bystander)
    assert choose(snapshot, for_s=LOOK_S).targets == ()
    assert all(one.condition is not Condition.GHOST for one in judge(snapshot, LOOK_S))


@pytest.mark.parametrize("bystander", BYSTANDERS.values(), ids=[*BYSTANDERS])
def test_unrelated_child_of_a_ghost_is_not_ended(bystander: Process) -> None:
    """A child that is no part of the job; parts of the ghost are ended."""
    ghost = process(100, command=SPAWN)
    begun = replace(bystander, parent=100)
    is_part = role_of(begun) in (Role.LOADER_WORKER, Role.SPAWNED, Role.FORKED)
    targets = {one.pid for one, _ in choose(snapshot_of(ghost, begun), for_s=LOOK_S).targets}
    foreign = begun.owner != OWNER or begun.namespace != HERE
    assert targets == ({100, 101} if is_part and not foreign else {100})


def test_parts_of_a_ghost_are_ghosts() -> None:
    rank = process(101, **RANK)
    loader = process(102, parent=101, **LOADER, used_s=0.9)
    grandchild = process(103, parent=102, is_forked=True, group=100, used_s=0.9)
    sleeper = process(104, parent=101, exe="/bin/sleep", command=("sleep", "9"), has_torch=False)
    assert ghost_pids(snapshot_of(rank, loader, grandchild, sleeper)) == {101, 102, 103}


LIVING = {
    "training as the first process of a container": replace(
        INIT, exe=PYTHON, command=TRAINS, has_torch=True, owner=OWNER
    ),
    "torchrun as the first process of a container": replace(
        INIT, exe=PYTHON, command=("python", "-m", "torch.distributed.run"), has_torch=True,
        owner=OWNER,
    ),
    "a script that has given itself a title": process(100, command=("experiment 7",)),
    "a script that another user owns": process(100, owner=0, exe="", command=(), has_torch=False),
    "a script that may not be read": process(100, exe="", command=(), has_torch=False),
}  # fmt: skip


@pytest.mark.parametrize("parent", LIVING.values(), ids=[*LIVING])
@pytest.mark.parametrize("part", ORPHANS.values(), ids=[*ORPHANS])
def test_process_whose_parent_may_live_is_no_ghost(parent: Process, part: Process) -> None:
    child = replace(part, parent=parent.pid)
    snapshot = ProcessSnapshot(
        processes=(*({INIT} - {parent} if parent.pid != 1 else ()), parent, SHELL, LOOKER, child),
        own=60, owner=OWNER, namespace=HERE,
    )  # fmt: skip
    assert 101 not in ghost_pids(snapshot)
    assert choose(snapshot, for_s=LOOK_S).targets == ()


def test_loader_worker_of_a_fork_server_is_no_ghost() -> None:
    """The fork server of multiprocessing, which ends with the script and does not import torch."""
    words = ("python", "-c", "from multiprocessing.forkserver import main; main(5, 6, [])")
    server = process(101, parent=100, has_torch=False, command=words)
    loader = process(102, parent=101, command=words, **{**LOADER, "group": 100})
    assert ghost_pids(snapshot_of(SCRIPT, server, loader)) == set()


def test_process_that_started_later_is_not_the_parent() -> None:
    """Its number was reused by another process that runs the same program."""
    later = process(100, start_ticks=500)
    assert has_lost_parent(process(101, parent=100, **LOADER), snapshot_of(later))


def test_no_process_is_idle_without_a_second_look() -> None:
    forked = process(101, is_forked=True, group=100)
    assert ghosts(snapshot_of(forked), 0.0) == {}


def test_naming_a_notebook_selects_only_it_and_its_parts() -> None:
    kernel = process(100, parent=50, command=("python", "-m", "ipykernel_launcher"))
    loader = process(101, parent=100, **LOADER, command=kernel.command)
    shell = process(102, parent=100, exe="/bin/bash", command=("bash",), has_torch=False)
    orphan = process(103, **LOADER)
    chosen = choose(snapshot_of(kernel, loader, shell, orphan), (100,), LOOK_S)
    assert {one.pid for one, _ in chosen.targets} == {100, 101}
    assert chosen.refused == ()


def test_process_adopted_by_init_is_no_part_of_init() -> None:
    snapshot = snapshot_of(process(101, **LOADER), SCRIPT, process(102, parent=100, **LOADER))
    assert choose(snapshot, (1,), LOOK_S).targets == ()
    shell = process(100, exe="/bin/bash", has_torch=False, devices=("/dev/nvidia0",))
    assert (
        choose(snapshot_of(shell, process(103, parent=100, **LOADER)), (100,), LOOK_S).targets == ()
    )
    adopted = process(103, parent=100, is_forked=True, exe="/opt/other/python3")
    chosen = choose(snapshot_of(SCRIPT, adopted), (100,), LOOK_S)
    assert [one.pid for one, _ in chosen.targets] == [100]


@pytest.mark.parametrize(
    ("named", "why"),
    [
        (60, "this command runs in it"),
        (7, "no such process"),
        (102, "does not train; use kill"),
        (103, "another user's"),
        (104, "another PID namespace"),
        (105, "may not be read"),
        (106, "has ended"),
    ],
)
def test_protected_process_is_refused_even_by_number(named: int, why: str) -> None:
    snapshot = snapshot_of(
        process(102, has_torch=False),
        process(103, owner=7),
        process(104, namespace="pid:[2]"),
        process(105, namespace=""),
        process(106, namespace="", state="Z"),
    )
    chosen = choose(snapshot, (named,), LOOK_S)
    assert chosen.targets == ()
    assert why in chosen.refused[0].reason


def test_notebook_running_this_command_is_not_ended() -> None:
    kernel = process(100, parent=50, command=("python", "-m", "ipykernel_launcher"))
    snapshot = ProcessSnapshot(
        processes=(INIT, SHELL, kernel, replace(LOOKER, parent=100)), own=60, owner=OWNER,
        namespace=HERE,
    )  # fmt: skip
    assert choose(snapshot, (100,), LOOK_S).targets == ()


def test_processes_of_a_job_are_grouped_under_their_leader() -> None:
    agent = process(100, parent=50, command=("python", "-m", "torch.distributed.run", "t.py"))
    ranks = [process(pid, parent=100, **{**RANK, "session": pid}) for pid in (101, 102)]
    loader = process(103, parent=101, **LOADER)
    judged = judge(snapshot_of(agent, *ranks, loader), LOOK_S)
    assert {judgement.leader for judgement in judged} == {100}
    assert [judgement.role for judgement in judged] == [
        Role.LAUNCHER, Role.RANK, Role.RANK, Role.LOADER_WORKER
    ]  # fmt: skip
