"""The command line: help, errors, exit codes and JSON."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.cli import app as command
from paceline.config import NAMES, RunSettings, flag_of
from paceline.errors import PacelineError, WorkerError
from paceline.launch import launcher
from paceline.program import Program, ScriptProgram, TaskProgram
from paceline.report.live import Observer
from paceline.report.summary import Summary, summarize
from paceline.trace import Trace


class Launched:
    """A stand-in for the launcher that records what it was asked to run."""

    def __init__(self, folder: Path) -> None:
        self.program: Program | None = None
        self.settings: RunSettings | None = None
        self.error: BaseException | None = None
        self._folder = folder

    def __call__(self, program: Program, settings: RunSettings, observer: Observer) -> Summary:
        self.program, self.settings = program, settings
        if self.error is not None:
            raise self.error
        observer.printed("the script's own words\n")
        trace = Trace(self._folder / "trace.jsonl")
        trace.header(task=program.name, workers=settings.workers)
        trace.end(1.0, "finished")
        trace.close()
        summary = summarize(self._folder)
        observer.finished(summary)
        return summary


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Launched:
    monkeypatch.chdir(tmp_path)
    for name in NAMES:
        monkeypatch.delenv(f"PACELINE_{name.upper()}", raising=False)
    stand_in = Launched(tmp_path)
    monkeypatch.setattr(launcher, "launch_run", stand_in)
    (tmp_path / "train.py").write_text("print('hello')\n")
    return stand_in


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def paceline(launched: Launched, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command line; return exit code, standard output and standard error."""

    def run(*tokens: str) -> tuple[int, str, str]:
        code = command.run(list(tokens))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_help_names_every_verb(paceline: Run) -> None:
    code, out, _ = paceline("--help")
    assert code == 0
    for verb in command.VERBS:
        assert verb.name in out
        assert verb.help in out


def test_help_wraps_at_the_terminal_width_not_as_the_docstring(
    paceline: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    _, out, _ = paceline("bench", "collectives", "--help")
    lines = [line.strip("│ ") for line in out.splitlines()]
    assert any(line.startswith("Message costs are kept") and line.endswith(".") for line in lines)
    assert any("Operation to measure" in line and "all-to-all" in line for line in lines)
    _, out, _ = paceline("doctor", "--help")
    assert sum(line.startswith("Example: ") for line in out.splitlines()) == 4


def test_help_of_a_verb_with_subcommands_shows_its_examples(paceline: Run) -> None:
    _, out, _ = paceline("probe", "--help")
    assert "Example: paceline probe --plot probe.svg" in out


def test_help_omits_defaults_of_switches_and_empty_strings(paceline: Run) -> None:
    for verb in (("probe",), ("bench", "scaling"), ("launch",), ("doctor",)):
        _, out, _ = paceline(*verb, "--help")
        assert "default: False" not in " ".join(out.split())
        assert 'default: ""' not in out


@pytest.mark.parametrize("verb", [verb.name for verb in command.VERBS])
def test_every_verb_has_a_help_page(verb: str, paceline: Run) -> None:
    code, out, _ = paceline(verb, "--help")
    assert code == 0
    assert f"Usage: paceline {verb}" in out


@pytest.mark.parametrize(
    ("words", "usage"),
    [
        ("launch", "launch [OPTIONS] SCRIPT [ARGS...]"),
        ("doctor", "doctor [OPTIONS] [SCRIPT] [ARGS...]"),
        ("report", "report [OPTIONS] [RUN]"),
        ("bench collectives", "bench collectives [OPTIONS] [OPERATION]"),
        ("plan", "plan --workers INT [OPTIONS] TASK"),
    ],
)
def test_usage_line_names_the_arguments(words: str, usage: str, paceline: Run) -> None:
    code, out, _ = paceline(*words.split(), "--help")
    assert code == 0
    assert f"Usage: paceline {usage}\n" in out


def test_launch_without_a_script_shows_an_example(paceline: Run) -> None:
    code, _, err = paceline("launch", "--workers", "2")
    assert code == 2
    assert "no script was named; write e.g. paceline launch --workers 4 train.py" in err


def test_help_of_train_and_launch_names_every_setting(paceline: Run) -> None:
    for verb in ("train", "launch"):
        _, out, _ = paceline(verb, "--help")
        assert all(flag_of(name) in out for name in NAMES)


def test_flags_become_settings(paceline: Run, launched: Launched) -> None:
    code, _, _ = paceline(
        "train", "lenet", "--workers", "4", "--protocol=k-sync:3", "--slow", "1=5x", "--slow",
        "2=3x", "--delay", "exp:20ms", "--lr", "0.2", "--keep-best",
    )  # fmt: skip
    assert code == 0
    assert launched.program == TaskProgram(task="lenet")
    assert launched.settings == RunSettings(
        workers=4, protocol="k-sync:3", slow=("1=5x", "2=3x"), delay=("exp:20ms",), lr=0.2,
        keep_best=True,
    )  # fmt: skip


def test_flag_overrides_the_setting_of_make_train(
    paceline: Run, launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    for name, value in re.findall(r"(PACELINE_\w+)=(\S+)", makefile):
        monkeypatch.setenv(name, value)
    assert paceline("train", "lenet", "--epochs", "1")[0] == 0
    assert launched.settings == RunSettings(workers=2, batch_size=256, lr=0.2, epochs=1)


def test_named_settings_file_is_read(paceline: Run, launched: Launched, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("workers = 3\nepochs = 2\n")
    assert paceline("train", "mlp", "--config", "run.toml", "--epochs", "5")[0] == 0
    assert launched.settings == RunSettings(workers=3, epochs=5)


@pytest.mark.parametrize(
    "spelling", ["--num-processes", "--num_processes", "--nproc-per-node", "--nproc_per_node", "-n"]
)
def test_other_launchers_flags_for_workers_are_accepted(
    spelling: str, paceline: Run, launched: Launched
) -> None:
    for tokens in (("train", spelling, "3", "mlp"), ("launch", spelling, "3", "train.py")):
        assert paceline(*tokens)[0] == 0
        assert launched.settings == RunSettings(workers=3)


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--gpus", "use --workers N --device cuda"),
        ("--node-rank", "NODE_RANK=1"),
        ("--num-nodes", "--workers-per-node is missing"),
        ("--nnodes", "--workers-per-node is missing"),
        ("--max-steps", "use --updates N"),
        ("--backend", "use --path store or --path peers"),
    ],
)
def test_other_launchers_flags_with_another_meaning_are_refused(
    flag: str, words: str, paceline: Run
) -> None:
    for verb, name in (("train", "lenet"), ("launch", "train.py")):
        code, _, err = paceline(verb, flag, "2", name)
        assert code == 2
        assert words in err


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (("tran", "lenet"), "unknown verb 'tran' (see paceline --help); did you mean 'train'?"),
        (("train", "lenet", "--wrkers", "2"), "--wrkers. Did you mean --workers?"),
        (("launch", "--wrkers", "2", "train.py"), "'--wrkers' (before the script's name); did you"),
        (("train", "lenet", "--workers", "0"), "workers must be >= 1, got 0 (--workers)"),
        (("train", "lenet", "--workers", "two"), "expected a whole number, got 'two'"),
        (("train", "lenet", "--engine", "ray"), 'Choose from: "local", "inline"'),
        (("train",), "TASK requires an argument"),
        (("launch",), "no script was named; write e.g. paceline launch --workers 4 train.py"),
        (("launch", "gone.py"), "there is no script gone.py (looked in "),
        (("launch", "-m", "no.such.module"), "there is no module no.such.module"),
        (("report", "gone"), "no run found at gone"),
        (("config", "sho"), 'Did you mean "show"?'),
        (("env", "all", "it"), "env does not take 'all it': leave it out, or see paceline env"),
        (
            ("data", "get", "digits", "x"),
            "data get does not take 'x': leave it out, or see paceline data get",
        ),
    ],
)
def test_usage_error_gets_one_message_and_exit_code_2(
    tokens: tuple[str, ...], message: str, paceline: Run
) -> None:
    code, out, err = paceline(*tokens)
    assert code == 2
    assert out == ""
    assert message in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "code"), [(WorkerError("worker 1 failed at t.py:3"), 1), (KeyboardInterrupt(), 130)]
)
def test_failed_or_interrupted_run_sets_the_exit_code(
    error: PacelineError | KeyboardInterrupt, code: int, paceline: Run, launched: Launched
) -> None:
    launched.error = error
    result, out, err = paceline("train", "lenet")
    assert result == code
    assert out == ""
    assert err == ("interrupted\n" if code == 130 else "error: worker 1 failed at t.py:3\n")


def test_json_output_is_exactly_one_object(paceline: Run, launched: Launched) -> None:
    for tokens in (("train", "lenet", "--json"), ("launch", "--json", "train.py")):
        code, out, err = paceline(*tokens)
        assert code == 0
        assert out.count("\n") == 1
        assert json.loads(out)["updates"] == 0
        assert err == "the script's own words\n"


def test_json_of_a_failure_is_one_object(paceline: Run, launched: Launched) -> None:
    launched.error = WorkerError("worker 1 failed")
    code, out, err = paceline("train", "lenet", "--json")
    assert code == 1
    assert json.loads(out) == {"error": {"kind": "WorkerError", "message": "worker 1 failed"}}
    assert err == "error: worker 1 failed\n"


def test_arguments_after_the_script_belong_to_the_script(paceline: Run, launched: Launched) -> None:
    code, _, _ = paceline(
        "launch", "--workers", "4", "--json", "train.py", "--workers", "9", "-m", "--gpus=1", "x"
    )
    assert code == 0
    assert launched.settings == RunSettings(workers=4, json=True)
    own = ("--workers", "9", "-m", "--gpus=1", "x")
    assert launched.program == ScriptProgram(path="train.py", args=own)


@pytest.mark.parametrize("source", ["--lr", "PACELINE_LR", "paceline.toml"])
def test_settings_for_tasks_are_refused_when_launching_a_script(
    source: str,
    paceline: Run,
    launched: Launched,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flags = ("--lr", "0.5") if source == "--lr" else ()
    if source == "PACELINE_LR":
        monkeypatch.setenv(source, "0.5")
    elif source == "paceline.toml":
        (tmp_path / source).write_text("lr = 0.5\n")
    code, out, err = paceline("launch", "--workers", "2", *flags, "train.py")
    assert (code, out) == (2, "")
    assert f"error: lr 0.5 ({source}) is for tasks, a script sets its own" in err
    assert launched.program is None
    assert paceline("train", *flags, "lenet")[0] == 0
    assert launched.settings is not None
    assert launched.settings.lr == 0.5


def test_module_is_launched_by_name(paceline: Run, launched: Launched) -> None:
    assert paceline("launch", "-m", "json.tool", "--indent", "2")[0] == 0
    assert launched.program == ScriptProgram(
        path="json.tool", args=("--indent", "2"), is_module=True
    )


def test_report_is_printed_again_from_the_run(paceline: Run, tmp_path: Path) -> None:
    _, first, _ = paceline("train", "lenet", "--workers", "1")
    code, again, _ = paceline("report", str(tmp_path))
    assert code == 0
    assert again.splitlines()[-1] == first.splitlines()[-1]
    assert again.splitlines()[-1] == "test acc: -, - sec/epoch on ['cpu:0']"
    _, out, _ = paceline("report", str(tmp_path), "--json")
    assert json.loads(out)["task"] == "lenet"


def test_config_shows_each_value_with_its_origin(
    paceline: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "paceline.toml").write_text("epochs = 3\n")
    monkeypatch.setenv("PACELINE_LR", "0.2")
    code, out, _ = paceline("config", "show", "--origin", "--workers", "2")
    assert code == 0
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines()}
    assert rows["workers"] == ["2", "--workers"]
    assert rows["epochs"] == ["3", "paceline.toml"]
    assert rows["lr"] == ["0.2", "PACELINE_LR"]
    assert rows["engine"] == ["local", "default"]
    assert set(rows) == set(NAMES) - {"json"}
    _, out, _ = paceline("config", "show", "--json")
    assert json.loads(out)["settings"]["lr"] == {"value": 0.2, "origin": "PACELINE_LR"}


def test_main_exits_the_process_with_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["paceline", "--version"])
    with pytest.raises(SystemExit) as end:
        command.main()
    assert end.value.code == 0


@pytest.mark.parametrize("tokens", [["train", "lenet"], ["launch", "nothere.py"]], ids=" ".join)
@pytest.mark.parametrize("source", ["variable", "file", "named file"])
def test_error_is_json_wherever_json_was_requested(
    source: str,
    tokens: list[str],
    paceline: Run,
    launched: Launched,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched.error = WorkerError("worker 1 failed")
    if source == "variable":
        monkeypatch.setenv("PACELINE_JSON", "1")
    elif source == "file":
        (tmp_path / "paceline.toml").write_text("json = true\n")
    else:
        (tmp_path / "other.toml").write_text("json = true\n")
        tokens = [tokens[0], "--config", "other.toml", *tokens[1:]]
    code, out, err = paceline(*tokens)
    assert code != 0
    assert json.loads(out)["error"]["message"] in err


@pytest.mark.parametrize(
    "line",
    ["train lenet --workers 2.5", "launch --epochs=1.5 train.py", "simulate --workers 2.5",
     "plan lenet --workers 2 --cores 1.5"],
)  # fmt: skip
def test_fractional_counts_are_refused(line: str, paceline: Run) -> None:
    code, _, err = paceline(*line.split())
    assert code == 2
    assert "expected a whole number, got " in err


def test_resumed_run_keeps_its_settings(
    say: Callable[[str], tuple[int, str, str]],
) -> None:
    train = "train softmax --workers 2 --engine inline --updates 4 --lr 0.03 --name one"
    assert say(train)[0] == 0
    code, out, err = say("config show --resume runs/one --origin")
    assert code == 0, err
    (line,) = [one for one in out.splitlines() if one.startswith("lr ")]
    assert line.split() == ["lr", "0.03", "the", "run"]
