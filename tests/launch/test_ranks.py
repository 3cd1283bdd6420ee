"""Decisions before a run of ranks starts: settings, the folder of a job's restarts."""

import errno
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in its stubs

from paceline.cli.app import run
from paceline.config import Resolved, resolve
from paceline.engines.torchrun.post import Hello
from paceline.engines.torchrun.world import RankOfWorld, boot_of_machine
from paceline.errors import ConfigError
from paceline.launch import connecting, job, ranks
from paceline.program import ScriptProgram, TaskProgram
from paceline.script import worker
from ranks import free_port

RANK = RankOfWorld(rank=0, size=2, local_rank=0, address="node1", port=1234, job="abc")
HELLO = Hello("node1", 7, '{"lr": 0.1}', ("", "", "", "0"), "")


def given(**settings: object) -> Resolved:
    return resolve(settings, env={})


def test_connect_is_the_workers_own_without_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    assert connecting.connect() is worker.current_pace()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"protocol": "k-sync:2"}, "decides after each push.*paceline launch --workers 2"),
        ({"protocol": "adaptive-local:2"}, "decides after each push"),
        ({"path": "store"}, "is the store, which.*paceline launch"),
        ({"path": "peers"}, "is the store"),
        ({"respawn": True}, "--max-restarts"),
        ({"stall_after": 3.0}, "--max-restarts"),
        ({"on_worker_error": "continue"}, "all workers are needed"),
        ({"workers": 4}, "there are 2 processes"),
        ({"engine": "inline"}, "this process was started as one of several"),
        ({"fault": ("kill worker 1 at 3s",)}, "from within the worker"),
        ({"split": "network:3"}, "is for 3 workers, but there are 2"),
        ({"split": "network", "dry_run": True}, "paceline partition TASK -n 2 shows the cut"),
        ({"split": "network", "protocol": "local-sgd:2"}, "hold parts of one model step together"),
        ({"split": "network", "collective": "shared"}, "use --collective auto, or --split data"),
    ],
)
def test_settings_that_ranks_do_not_support_are_refused(
    settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        job.settings_of_ranks(given(**settings), RANK)


SCRIPT = ScriptProgram(path="train.py")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": 0.5}, r"lr 0.5 \(--lr\) is for tasks, .*lr=0.5\); .* train.py --lr 0.5$"),
        ({"batch_size": 64}, r"batch_size 64 .*DataLoader\(data, batch_size=64\)"),
        ({"mini_batch_size": 8}, r'mini_batch_size 8 .*batch_size=8\), .*batch="per-worker"'),
        ({"init": "default"}, r"init default .*weights itself"),
    ],
)
def test_settings_that_a_script_makes_itself_are_refused_with_advice(
    settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        job.refuse_of_tasks(SCRIPT, given(**settings))
    job.refuse_of_tasks(TaskProgram(task="lenet"), given(**settings))


def test_settings_for_tasks_are_refused_from_every_source(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("lr = 0.2\n")
    with pytest.raises(ConfigError, match=r"lr 0.2 \(.*run.toml\) is for tasks.*lr=0.2\)$"):
        job.refuse_of_tasks(SCRIPT, resolve({}, file, env={}))
    with pytest.raises(ConfigError, match=r"batch_size 9 \(PACELINE_BATCH_SIZE\) is for tasks"):
        job.refuse_of_tasks(SCRIPT, resolve({}, env={"PACELINE_BATCH_SIZE": "9"}))
    every = {"epochs": 2, "accumulate": 2, "scale_lr": "linear", "warmup": "5ep", "seed": 1}
    job.refuse_of_tasks(SCRIPT, given(**every))


def test_a_split_needs_several_workers_and_makes_them_ranks() -> None:
    assert job.is_split(given(split="2x2", workers=4).settings)
    assert not job.is_split(given(split="1x4", workers=4).settings)
    assert not job.is_split(given(workers=4).settings)
    with pytest.raises(ConfigError, match="but there is one: add --workers 2"):
        job.is_split(given(split="network").settings)


def test_faults_are_injected_in_the_first_start_only() -> None:
    resolved = given(fault=("kill worker 1 at update 3",))
    assert job.settings_of_ranks(resolved, RANK).fault
    assert job.settings_of_ranks(resolved, replace(RANK, restarts=1)).fault == ()


def test_a_restart_resumes_in_the_folder_of_the_first_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = job.JobFolder(RANK)
    settings = job.settings_of_ranks(given(), RANK)
    assert first.restore(given(), settings).run_dir is None
    first.began("/somewhere/runs/that")
    again = replace(RANK, restarts=1)
    result = job.JobFolder(again).restore(given(), settings)
    assert (result.run_dir, result.resume, result.workers) == ("/somewhere/runs/that", "auto", 2)
    other = replace(again, job="another")
    assert job.JobFolder(other).restore(given(), settings).resume is None
    first.forget()
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_restart_counted_elsewhere_is_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = job.settings_of_ranks(given(), RANK)
    job.JobFolder(RANK).began("/somewhere/runs/that")
    again = job.JobFolder(replace(RANK, life=2)).restore(given(), settings)
    assert (again.run_dir, again.resume) == ("/somewhere/runs/that", "auto")
    of_another = job.JobFolder(replace(RANK, life=1, restarts=1)).restore(given(), settings)
    assert (of_another.run_dir, of_another.resume) == (None, None)


def test_a_restart_with_a_new_store_resumes_where_it_was_told_to_run() -> None:
    """As where the first rank's machine is replaced: the others have counted a restart."""
    named = given(run_dir="/somewhere/runs/that")
    settings = job.settings_of_ranks(named, RANK)
    folder = job.JobFolder(replace(RANK, life=1), Kept())
    assert folder.restore(named, settings).resume is None
    again = folder.restore(named, settings, is_restarted=True)
    assert (again.run_dir, again.resume) == ("/somewhere/runs/that", "auto")
    assert folder.unknown_why == ""
    assert (
        folder.restore(given(), job.settings_of_ranks(given(), RANK), is_restarted=True).resume
        is None
    )
    assert "set PACELINE_RUN_DIR to the folder of the run" in folder.unknown_why


class Kept:
    """What torchrun keeps for one job."""

    def __init__(self) -> None:
        self._text = ""

    def keep(self, text: str) -> None:
        self._text = text

    def kept(self) -> str:
        return self._text


def test_two_jobs_with_one_id_resume_in_separate_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``--rdzv-id 100`` is what users copy."""
    monkeypatch.chdir(tmp_path)
    settings = job.settings_of_ranks(given(), RANK)
    keepers = Kept(), Kept()
    for keeper, folder in zip(keepers, ("/runs/one", "/runs/two"), strict=True):
        first = job.JobFolder(replace(RANK, life=1), keeper)
        assert first.restore(given(), settings).run_dir is None
        assert first.began(folder) == ""
    job.JobFolder(replace(RANK, life=1), keepers[1]).forget()
    results = [
        job.JobFolder(replace(RANK, life=2), keeper).restore(given(), settings)
        for keeper in keepers
    ]
    assert [result.run_dir for result in results] == ["/runs/one", None]
    assert not (tmp_path / "runs").exists()


def test_a_folder_that_no_restart_will_find_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").touch()
    message = job.JobFolder(RANK).began("/somewhere/that")
    assert message.startswith(
        "a restart will not find this run, since runs cannot be written (File "
    )
    assert "set PACELINE_RUN_DIR=/somewhere/that" in message


def test_an_incomplete_job_file_names_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / ".job-abc").touch()
    again = replace(RANK, restarts=1)
    result = job.JobFolder(again).restore(given(), job.settings_of_ranks(given(), RANK))
    assert (result.run_dir, result.resume) == (None, None)


def test_different_settings_are_named_with_both_machines() -> None:
    other = HELLO._replace(host="node2", settings='{"lr": 0.2}')
    with pytest.raises(ConfigError, match=r"0 and 1 \(node1 and node2\).*lr is 0.1 and 0.2.*_LR"):
        ranks._compare([HELLO, other])
    ranks._compare([HELLO, HELLO._replace(host="node2")])


def test_a_host_name_that_resolves_to_loopback_is_refused_between_machines_only() -> None:
    unreached = HELLO._replace(unreachable_why="its own name 'node1' resolves to 127.0.1.1")
    ranks._refuse_unreachable([unreached, HELLO])
    with pytest.raises(ConfigError, match=r"127\.0\.1\.1.*GLOO_SOCKET_IFNAME"):
        ranks._refuse_unreachable([unreached, HELLO._replace(host="node2")])


def test_two_machines_with_one_name_are_two() -> None:
    """Otherwise their names would not be resolved, and the plan would be that of one machine."""
    first, second = (HELLO._replace(host="localhost", boot=boot) for boot in ("a", "b"))
    unreached = second._replace(unreachable_why="its own name 'localhost' resolves to 127.0.0.1")
    with pytest.raises(ConfigError, match="worker 1 on localhost"):
        ranks._refuse_unreachable([first, unreached])
    assert ranks._num_machines([first, unreached, second]) == 2
    assert sys.platform != "linux" or len(boot_of_machine()) == 36


def test_an_unreadable_file_is_named_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def read() -> Resolved:
        raise PermissionError(errno.EACCES, "Permission denied", "runs/a")

    monkeypatch.setattr(ranks, "ControllerPost", lambda place, size: None)
    life: Any = SimpleNamespace(place=None, rank=RANK)
    thread = ranks.RunThread(life, TaskProgram(task="lenet"), read)
    codes: list[int] = []
    monkeypatch.setattr(thread, "_end_all", codes.append)
    thread.run()
    assert codes == [2]
    assert capsys.readouterr().err == "error: runs/a: Permission denied\n"


def test_the_last_of_several_workers_is_refused_where_it_would_begin_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port = free_port()
    store = TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)
    left = {
        "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "1",
    }  # fmt: skip
    for name, value in left.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(worker, "is_started", lambda: False)
    assert connecting.connect() is worker.current_pace()  # its job has only ever had one
    store.set("paceline/kept", "runs/that")
    resume = "let torchrun wait until there are 2 .*--workers 1 --resume runs/that SCRIPT"
    with pytest.raises(ConfigError, match=f"1 worker is left of the run in runs/that.*{resume}"):
        connecting.connect()
    assert run(["train", "quadratic"]) == 2


def test_a_process_without_a_launcher_resumes_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "is_started", lambda: False)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setenv("PACELINE_RESUME", "latest")
    with pytest.raises(ConfigError, match="paceline launch --workers 1 --resume latest SCRIPT"):
        connecting.connect()
