"""Ranks of several nodes by one command: what is started, and what is refused first."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from own_tree import python_path
from paceline.checkpoints.folder import CheckpointFolder
from paceline.config import resolve
from paceline.errors import ConfigError
from paceline.launch.nodes import Nodes
from paceline.report.summary import summarize
from ranks import free_port
from runs import Run

TWO = Nodes(count=2, workers=4)
WORDS = ("train", "lenet", "--nodes", "2", "--workers-per-node", "4")


def test_without_a_meeting_place_all_ranks_start_here() -> None:
    begun = TWO.command({}, WORDS)
    assert begun[1:] == [
        "-P", "-m", "paceline.launch.nodes", "--standalone", "--nproc-per-node", "8",
        "--no-python", sys.executable, "-P", "-u", "-m", "paceline", *WORDS,
    ]  # fmt: skip


def test_one_machine_starts_standalone() -> None:
    begun = Nodes(count=1, workers=4).command({"MASTER_ADDR": "localhost"}, WORDS)
    assert begun[4:7] == ["--standalone", "--nproc-per-node", "4"]


def test_a_machine_starts_its_own_ranks_where_all_meet() -> None:
    env = {"MASTER_ADDR": "10.0.0.1", "NODE_RANK": "1"}
    begun = " ".join(TWO.command(env, WORDS))
    assert "--nnodes 2 --node-rank 1 --nproc-per-node 4 --master-addr 10.0.0.1" in begun
    assert "--master-port 29500 --no-python" in begun
    assert begun.endswith(f"-m paceline {' '.join(WORDS)}")
    assert "--master-port 4000 " in " ".join(TWO.command({**env, "MASTER_PORT": "4000"}, WORDS))


@pytest.mark.parametrize("number", [None, "2", "-1", "one"])
def test_a_machine_without_a_number_is_told_how_to_set_it(number: str | None) -> None:
    env = {"MASTER_ADDR": "10.0.0.1"} | ({} if number is None else {"NODE_RANK": number})
    with pytest.raises(ConfigError, match=r"NODE_RANK.*set it to 0 on that machine"):
        TWO.command(env, WORDS)


@pytest.mark.parametrize(
    ("nodes", "workers", "message"),
    [
        (2, None, "--workers-per-node is missing"),
        (None, 2, "--nodes is missing"),
        (0, 2, "must be >= 1"),
        (2, -1, "must be >= 1"),
        (1000, 1000, "at most 1024, got 1000 and 1000"),
    ],
)
def test_impossible_numbers_are_refused(
    nodes: int | None, workers: int | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Nodes.from_flags(nodes, workers)


def test_another_number_of_workers_is_refused() -> None:
    TWO.refuse_workers(resolve({"workers": 8}, env={}))
    with pytest.raises(ConfigError, match=r"workers is 4 .*leave workers out"):
        TWO.refuse_workers(resolve({"workers": 4}, env={}))
    with pytest.raises(ConfigError, match="is 8 workers, but 2 were started"):
        TWO.check(2)


@pytest.mark.timeout(230)
def test_one_command_with_a_seed_gives_the_same_result_twice(tmp_path: Path) -> None:
    words = ("train", "mlp488k", "--nodes", "2", "--workers-per-node", "1", "--seed", "3")
    (tmp_path / "random.py").write_text("raise OSError('not this one')")
    results = []
    for name in ("first", "second"):
        begun = subprocess.run(
            [sys.executable, "-P", "-m", "paceline", *words, "--updates", "12", "--name", name],
            cwd=tmp_path, env=os.environ, capture_output=True, text=True, timeout=110, check=False,
        )  # fmt: skip
        assert begun.returncode == 0, begun.stderr
        assert "2 nodes of 1, all on this machine" in begun.stderr
        run = Run(folder=tmp_path / "runs" / name, summary=summarize(tmp_path / "runs" / name))
        pushes = [(push.ticket, push.num_samples, push.loss) for push in run.pushes]
        results.append((run.summary.test_accuracy, pushes))
    assert len(results[0][1]) == 24
    assert results[0] == results[1]


FOREVER = ("train", "mlp488k", "--workers", "2", "--split", "shard", "--run-dir", "run")


def begin(folder: Path, *words: str) -> "subprocess.Popen[str]":
    """Run one command that starts ranks, in its own process group, until it has made an update."""
    begun = subprocess.Popen(
        [sys.executable, "-m", "paceline", *words],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    trace = folder / "run" / "trace.jsonl"
    end_s = time.monotonic() + 120
    while not trace.is_file() or '"kind":"apply"' not in trace.read_text():
        assert begun.poll() is None, begun.communicate()[0]
        assert time.monotonic() < end_s
        time.sleep(0.05)
    return begun


@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_all_ranks_softly_and_torchrun_is_quiet(
    tmp_path: Path, number: signal.Signals
) -> None:
    begun = begin(tmp_path, *FOREVER)
    os.killpg(begun.pid, number) if number == signal.SIGINT else begun.send_signal(number)
    output, _ = begun.communicate(timeout=120)
    assert begun.returncode == 128 + number, output
    assert "Traceback" not in output
    assert "Sending process" not in output  # nor anything else of torchrun
    assert output.count("interrupted") == 2, output  # in the summary, and as the last word
    assert CheckpointFolder(tmp_path / "run" / "checkpoints").newest().note == ""


@pytest.mark.timeout(100)
def test_ctrl_c_ends_a_machine_that_waits_for_the_others(tmp_path: Path) -> None:
    port = free_port()
    env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE_RANK": "0"}
    words = ("train", "mlp488k", "--nodes", "2", "--workers-per-node", "1")
    begun = subprocess.Popen(
        [sys.executable, "-m", "paceline", *words], cwd=tmp_path, env=env, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    end_s = time.monotonic() + 60
    while not any(link.laddr.port == port for link in psutil.Process(begun.pid).net_connections()):
        assert begun.poll() is None, begun.communicate()[0]
        assert time.monotonic() < end_s
        time.sleep(0.05)
    os.killpg(begun.pid, signal.SIGINT)
    output, _ = begun.communicate(timeout=10)
    assert begun.returncode == -signal.SIGINT, output
    assert output == ""


LOOKS_LONG = """
import time
from dataclasses import replace
from paceline.workloads import load_task

task = load_task("quadratic", 2)


def metrics(outputs, targets):
    open("looks", "w").close()
    time.sleep(600)  # longer than any process waits


task = replace(task, metrics=metrics)
"""


@pytest.mark.timeout(300)
def test_a_rank_in_a_long_evaluation_is_ended_before_torchrun_kills_all(tmp_path: Path) -> None:
    (tmp_path / "looks_long.py").write_text(LOOKS_LONG)
    words = ("train", "looks_long:task", "--nodes", "2", "--workers-per-node", "1")
    begun = subprocess.Popen(
        [sys.executable, "-m", "paceline", *words, "--run-dir", "run"], cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": python_path(tmp_path)}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    end_s = time.monotonic() + 120
    while not (tmp_path / "looks").exists():
        assert begun.poll() is None, begun.communicate()[0]
        assert time.monotonic() < end_s
        time.sleep(0.05)
    begun.send_signal(signal.SIGTERM)
    asked_s = time.monotonic()
    output, _ = begun.communicate(timeout=120)
    assert 15 < time.monotonic() - asked_s < 29, output
    assert "worker 0 has not come to its end 2" in output
    # Its first epoch's end is in no checkpoint yet, and the worker to copy it does not answer.
    assert begun.returncode == 143, output
    assert output.count("error:") == 1, output
    assert "error: the end of the run could not be written" in output


@pytest.mark.timeout(300)
def test_a_ranks_error_is_one_line_with_its_own_exit_code(tmp_path: Path) -> None:
    words = ("train", "mlp488k", "--workers", "2", "--split", "5x5")
    begun = subprocess.run(
        [sys.executable, "-m", "paceline", *words],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert begun.returncode == 2
    assert begun.stderr.startswith("error: ")
    assert "Traceback" not in begun.stderr


@pytest.mark.timeout(300)
def test_an_error_is_reported_when_all_ranks_are_killed_at_once(tmp_path: Path) -> None:
    begun = begin(tmp_path, *FOREVER)
    for child in psutil.Process(begun.pid).children():
        if "multiprocessing" not in " ".join(child.cmdline()):
            child.kill()
    output, _ = begun.communicate(timeout=120)
    assert begun.returncode == 1, output
    assert "Traceback" not in output
    assert sum(line.startswith("error: ") for line in output.splitlines()) == 1, output


@pytest.mark.timeout(300)
@pytest.mark.parametrize("rank", ["0", "1"])
def test_one_killed_rank_is_reported_by_the_other_only(tmp_path: Path, rank: str) -> None:
    begun = begin(tmp_path, *FOREVER)
    children = psutil.Process(begun.pid).children()
    next(child for child in children if child.environ().get("RANK") == rank).kill()
    output, _ = begun.communicate(timeout=120)
    assert begun.returncode == 1, output
    assert "all workers were killed" not in output
    assert sum(line.startswith("error: ") for line in output.splitlines()) == 1, output
