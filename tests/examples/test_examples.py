"""The examples run as documented, with small sizes."""

import difflib
from pathlib import Path

import pytest

import forked
from paceline.cli import app as command
from paceline.config import NAMES
from runs import nothing_left

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ("--samples", "768", "--epochs", "1", "--batch-size", "64")


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty current folder, and no settings in the environment."""
    monkeypatch.chdir(tmp_path)
    for name in NAMES:
        monkeypatch.delenv(f"PACELINE_{name.upper()}", raising=False)
    return tmp_path


def code_of(name: str) -> list[str]:
    """The lines after the docstring, without their indentation."""
    text = (EXAMPLES / name).read_text().split('"""', 2)[2]
    return [line.strip() for line in text.splitlines() if line.strip()]


def run(name: str, *args: str) -> str:
    """Run an example as python does; return what it prints."""
    done = forked.run([EXAMPLES / name, *args])
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def launch(*tokens: str) -> None:
    with nothing_left():
        assert command.run(list(tokens)) == 0


def test_second_example_differs_from_the_first_in_four_lines() -> None:
    delta = list(difflib.ndiff(code_of("01_plain.py"), code_of("02_paceline.py")))
    assert [line for line in delta if line.startswith("- ")] == [
        "- for epoch in range(arguments.epochs):"
    ]
    assert [line for line in delta if line.startswith("+ ")] == [
        "+ import paceline",
        "+ pace = paceline.connect()",
        "+ model, optimizer, loader = pace.prepare(model, optimizer, loader)",
        "+ for epoch in pace.epochs(arguments.epochs):",
        "+ with pace.step():",
    ]


@pytest.mark.parametrize("name", ["01_plain.py", "02_paceline.py"])
def test_scripts_run_under_python(name: str) -> None:
    assert "epoch 1: test accuracy 0." in run(name, *SMALL)


@pytest.mark.parametrize(
    "protocol", ["full-sync", "k-batch-sync:2", "async", "stale-synchronous:1"]
)
def test_second_example_runs_under_any_protocol(
    protocol: str, capsys: pytest.CaptureFixture[str]
) -> None:
    script = str(EXAMPLES / "02_paceline.py")
    launch("launch", "--workers", "2", "--protocol", protocol, script, *SMALL)
    output = capsys.readouterr().out
    assert output.count("epoch 1: test accuracy 0.") == 1  # printed once, by the main worker
    assert "samples           768" in output


def test_custom_task_learns(
    monkeypatch: pytest.MonkeyPatch, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(EXAMPLES)
    protocol = ("--protocol", "k-batch-sync:3", "--run-dir", str(here / "run"))
    launch("train", "03_own_task:task", "--workers", "2", "--epochs", "4", *protocol)
    last = capsys.readouterr().out.splitlines()[-1]
    assert float(last.removeprefix("test acc: ").split(",")[0]) > 0.8


def test_functions_of_main_reach_the_workers(here: Path) -> None:
    output = run("04_notebook_style.py", str(here / "run"))
    assert f"files in {here / 'run'}" in output
    assert "150 updates" in output


def test_loop_without_a_loader_runs_under_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert "version 3: loss " in run("06_without_a_loader.py", "--updates", "3")


def test_stream_runs_under_python() -> None:
    assert "epoch 1: version 4, loss" in run("10_streaming.py", "--samples", "256", "--epochs", "1")


@pytest.mark.parametrize(
    ("workers", "protocol"), [("2", "full-sync"), ("2", "k-batch-async:2"), ("4", "local-sgd:2")]
)
def test_stream_runs_under_any_protocol(
    workers: str, protocol: str, capsys: pytest.CaptureFixture[str]
) -> None:
    script = str(EXAMPLES / "10_streaming.py")
    words = ("--samples", "512", "--epochs", "1")
    launch("launch", "--workers", workers, "--protocol", protocol, script, *words)
    output = capsys.readouterr().out
    assert "it goes on from the data set's own state_dict" in output
    assert "samples           512" in output


@pytest.mark.parametrize(
    ("workers", "protocol"), [("2", "full-sync"), ("2", "k-batch-async:2"), ("4", "local-sgd:2")]
)
def test_loop_without_a_loader_runs_under_any_protocol(
    workers: str, protocol: str, capsys: pytest.CaptureFixture[str]
) -> None:
    script = str(EXAMPLES / "06_without_a_loader.py")
    launch("launch", "--workers", workers, "--protocol", protocol, script, "--updates", "4")
    output = capsys.readouterr().out
    assert "no loader: a batch is what a worker draws for one number" in output
    assert "updates           4, " in output


def test_gan_runs_under_python(here: Path) -> None:
    assert "epoch 1: generated images pass for real at 0." in run("07_gan.py", "--samples", "256")
    assert (here / "generator.safetensors").is_file()


@pytest.mark.parametrize(
    ("workers", "protocol", "says"),
    [
        ("2", "full-sync", "each step() is an update"),
        ("2", "k-batch-async:2", "all its gradients are of one version"),
        ("4", "local-sgd:2", "each steps on every worker by itself"),
    ],
)
def test_gan_runs_under_any_protocol(
    workers: str, protocol: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    script, words = str(EXAMPLES / "07_gan.py"), ("--samples", "512", "--epochs", "2")
    launch("launch", "--workers", workers, "--protocol", protocol, script, *words)
    output = capsys.readouterr().out
    assert says in " ".join(output.split())
    assert output.count("epoch 2: generated images pass for real at 0.") == 1


FRAMEWORKS = {"08_lightning.py": "lightning", "09_hugging_face.py": "transformers"}
PRELOAD = {"lightning": "lightning", "transformers": "transformers.trainer"}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "package"), FRAMEWORKS.items())
def test_framework_trainer_runs_under_python(name: str, package: str) -> None:
    pytest.importorskip(package)
    assert "0." in run(name, "--epochs", "1")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("workers", "protocol"), [("2", "full-sync"), ("2", "k-batch-async:2"), ("4", "local-sgd:2")]
)
@pytest.mark.parametrize(("name", "package"), FRAMEWORKS.items())
def test_framework_trainer_runs_under_any_protocol(
    name: str, package: str, workers: str, protocol: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip(package)
    script = str(EXAMPLES / name)
    words = ("--workers", workers, "--protocol", protocol, "--preload", PRELOAD[package])
    launch("launch", *words, script, "--epochs", "1")
    output = capsys.readouterr().out
    assert f"workers          {workers} on cpu" in output
    assert output.count("loss") > 1
    assert f"samples           {'2,048' if 'lightning' in name else '1,024'}" in output


def test_trainer_starts_its_own_workers() -> None:
    pytest.importorskip("lightning")
    words = ("--workers", "2", "--protocol", "k-batch-async:2", "--epochs", "1")
    output = run("08_lightning.py", *words)
    assert "workers          2 on cpu" in output
    assert output.count("update 32: validation loss") == 1


SEARCH = ("--samples", "1024", "--rates", "0.01", "0.3", "1e4")


def test_search_runs_under_python() -> None:
    lines = run("12_search.py", *SEARCH).splitlines()
    assert [line.partition(": ")[2].split()[0] for line in lines[-4:-1]] == [
        "test",
        "test",
        "left,",
    ]
    assert lines[-1] == "the best learning rate is 0.3"


@pytest.mark.parametrize(
    ("workers", "protocol"), [("2", "full-sync"), ("2", "k-batch-async:2"), ("4", "local-sgd:2")]
)
def test_search_runs_under_any_protocol(
    workers: str, protocol: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--workers", workers, "--protocol", protocol, "--run-dir", str(here / "run"))
    launch("launch", *words, str(EXAMPLES / "12_search.py"), *SEARCH)
    output = capsys.readouterr().out
    assert output.count("the best learning rate is 0.3") == 1
    rows = [line.split() for line in output.splitlines() if line.startswith("lr-")]
    assert [(row[0], row[-1]) for row in rows] == [
        ("lr-0.01", "finished"), ("lr-0.3", "finished"), ("lr-10000", "failed"),
    ]  # fmt: skip
    assert sorted(path.name for path in (here / "run").glob("lr-*")) == [row[0] for row in rows]


ENDS = "at the end a pole stands for "


def test_policy_learns_under_python() -> None:
    lines = run("11_reinforcement.py").splitlines()
    first, last = (float(line.rpartition(" for ")[2].split()[0]) for line in (lines[0], lines[-1]))
    assert first < 40
    assert last > 120


@pytest.mark.parametrize(
    ("workers", "protocol"), [("2", "full-sync"), ("2", "k-batch-async:2"), ("4", "local-sgd:2")]
)
def test_policy_learns_under_any_protocol(
    workers: str, protocol: str, capsys: pytest.CaptureFixture[str]
) -> None:
    script = str(EXAMPLES / "11_reinforcement.py")
    launch("launch", "--workers", workers, "--protocol", protocol, script, "--updates", "40")
    output = capsys.readouterr().out
    assert "updates           40, " in output
    assert float(output.partition(ENDS)[2].split()[0]) > 80


def test_five_layers_over_four_workers_print_the_expected_numbers() -> None:
    out = run("13_five_layers.py")
    assert "over layers   16 8 8 8                  66          192" in out
    assert "over neurons  10 10 10 10               24          192" in out
    assert "both, 2 x 2   8 8 12 12                 28          160" in out
    steps = {
        line.split("  ")[0]: float(line.split(" ms")[0].split()[-1])
        for line in out.splitlines()
        if " ms, balance" in line
    }
    assert steps["found"] == steps["best of all"] < steps["even"]
