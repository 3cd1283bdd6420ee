"""Exported files reproduce their models or are refused with a reason."""

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from paceline.exports import FORMATS

Say = Callable[[str], tuple[int, str, str]]
OWN = "export --input 1,4 --model somenets"
LACKING = {
    "aoti": "" if shutil.which("g++") else "no C++ compiler: g++",
    "onnx": ""
    if all(importlib.util.find_spec(name) for name in ("onnx", "onnxscript", "onnxruntime"))
    else "no onnx, onnxscript, onnxruntime",
}


def lacking(name: str) -> None:
    if LACKING.get(name):
        pytest.skip(LACKING[name])


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("task", "name"),
    [
        # aoti is slow to write; test_cpp.py checks and runs it.
        *(("lenet", name) for name in FORMATS if name != "aoti"),
        ("mlp", "export"),
        ("resnet18", "torchscript"),
        ("transformer", "torchscript"),
    ],
)
def test_every_format_reproduces_the_output_of_the_model(say: Say, name: str, task: str) -> None:
    lacking(name)
    code, out, err = say(f"export {task} --format {name} --json")
    assert code == 0, err
    report = json.loads(out)
    assert set(report["max_differences"]) == {"1", "7"}
    assert max(report["max_differences"].values()) <= 1e-5
    assert report["num_bytes"] == Path(report["path"]).stat().st_size
    assert report["num_bytes"] > 0.9 * report["weights_bytes"]
    assert [latency["batch"] for latency in report["latencies"]] == [1, 7]
    assert report["accuracy"] is None  # meaningless for fresh weights


@pytest.mark.parametrize("name", ["torchscript", "torchscript-trace", "export"])
def test_exported_file_accepts_any_batch_size(say: Say, name: str) -> None:
    code, out, err = say(f"{OWN}:Plain --format {name} --json")
    assert code == 0, err
    run = FORMATS[name].load(Path(json.loads(out)["path"]))
    with torch.no_grad():
        assert run(torch.randn(13, 4)).shape == (13, 2)


def test_model_with_two_inputs_is_exported(say: Say) -> None:
    line = f"{OWN}:Pair --input 1,2:int64 --format export --json"
    code, out, err = say(line)
    assert code == 0, err
    assert json.loads(out)["accuracy"] is None


@pytest.mark.parametrize(
    ("rest", "said"),
    [
        ("Opens --format torchscript", ("open", "somenets.py:38")),
        ("Branch --format export", ("a branch depends on the values", "somenets.py:22")),
        ("Branch --format torchscript-trace", ("refused", "differs from the model's by")),
        ("Fixed --format export", ("the batch cannot vary", "--fixed-batch N")),
        ("Bare --format export --precision int8", ("no nn.Linear or nn.Conv2d",)),
        ("no_module --format export", ("must return an nn.Module, got int",)),
        ("absent --format export", ("could not be made", "absent")),
        ("Plain --format exprot", ("did you mean 'export'",)),
        ("Plain --format export --fixed-batch 0", ("--fixed-batch must be >= 1",)),
        ("Plain --format export --checkpoint nowhere", ("no checkpoint at nowhere",)),
    ],
)
def test_unexportable_model_is_refused_with_the_reason(
    say: Say, tmp_path: Path, rest: str, said: tuple[str, ...]
) -> None:
    code, _, err = say(f"{OWN}:{rest}")
    assert code == 2
    for words in said:
        assert words in err
    assert "Traceback" not in err
    assert [path.name for path in tmp_path.iterdir() if path.suffix in (".pt", ".pt2")] == []


@pytest.mark.parametrize("rest", ["", "--fixed-batch 2"])
def test_trace_of_a_branch_on_tokens_is_refused(say: Say, rest: str) -> None:
    line = f"export --model somenets:Tokens --input 1,16:int64 {rest} --format"
    code, _, err = say(f"{line} torchscript-trace")
    assert code == 2
    assert "differs from the model's by" in err
    assert say(f"{line} torchscript")[0] == 0


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("export", "give either a task or a run"),
        ("export lenet --model somenets:Plain", "give either a task or a run"),
        ("export --model somenets:Plain", "--model needs --input"),
        ("export --model somenets:Plain --input 1,x", "must be sizes >= 1"),
        ("export --model somenets:Plain --input 1,4:int65", "did you mean 'int64'"),
        ("export lenet --input 1,4", "--input is only for --model"),
    ],
)
def test_invalid_options_are_refused(say: Say, line: str, said: str) -> None:
    code, _, err = say(line)
    assert code == 2
    assert said in err


def test_fixed_batch_exports_only_that_batch_size(say: Say) -> None:
    code, out, err = say(f"{OWN}:Fixed --format export --fixed-batch 2 --json")
    assert code == 0, err
    assert list(json.loads(out)["max_differences"]) == ["2"]


def test_export_falls_back_only_on_request(say: Say) -> None:
    line = f"{OWN}:Branch --format export --fallback torchscript --json"
    code, out, _ = say(line)
    assert code == 0
    report = json.loads(out)
    assert report["format"] == "torchscript"
    assert "somenets.py:22" in report["fell_back"]


SCRIPT = """\
import torch
import paceline
pace = paceline.connect()
model = torch.nn.Linear(2, 1)
model, optimizer = pace.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for _ in pace.updates(2):
    with pace.step():
        optimizer.zero_grad()
        model(torch.ones(4, 2)).sum().backward()
        optimizer.step()
"""


def test_missing_compiler_is_reported_and_leaves_no_file(
    say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    code, _, err = say(f"{OWN}:Plain --format aoti")
    assert code == 2
    assert "no C++ compiler: no-such-compiler" in err
    assert not list(tmp_path.glob("*.pt2"))


def test_missing_onnx_is_reported(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    code, _, err = say(f"{OWN}:Plain --format onnx")
    assert code == 2
    assert "pip install 'paceline[onnx]'" in err


@pytest.mark.timeout(600)
def test_weights_of_a_run_are_exported_and_others_refused(say: Say) -> None:
    train = "train softmax --workers 1 --engine inline --updates 200 --name one"
    assert say(train)[0] == 0
    code, out, err = say("export runs/one --format torchscript --json")
    assert code == 0, err
    report = json.loads(out)
    assert report["is_trained"]
    assert report["subject"] == "softmax"
    assert report["accuracy"] > 0.5
    assert report["accuracy_samples"] >= 60
    assert report["file_accuracy"] == report["accuracy"]
    code, _, err = say("export lenet --checkpoint runs/one --format export")
    assert code == 2
    assert "a checkpoint of another model than lenet" in err
    code, out, err = say("export runs/one --format export --precision int8 --json")
    assert code == 0, err
    reduced = json.loads(out)
    assert abs(reduced["file_accuracy"] - report["accuracy"]) < 0.05


def test_run_of_a_custom_task_is_exported_and_a_script_gets_advice(
    say: Say, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(
        "import dataclasses\nfrom paceline.workloads import load_task\n"
        "task = dataclasses.replace(load_task('softmax'), name='other')\n"
    )
    train = "train mine:task --workers 1 --engine inline --updates 20 --name own"
    assert say(train)[0] == 0
    code, out, err = say("export runs/own --format torchscript --json")
    assert code == 0, err
    assert json.loads(out)["subject"] == "other"
    (tmp_path / "lenet.py").write_text(SCRIPT)
    assert say("launch --workers 1 --engine inline --name script lenet.py")[0] == 0
    code, _, err = say("export runs/script")
    assert code == 2
    assert "runs/script ran the script lenet.py; give the model by the function" in err


ARRAYS = """
import numpy as np
import torch
from torch import nn
from paceline import Splits, Task
from paceline.workloads.base import loss_metrics


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return np.full(4, index, dtype=np.float32), index % 2


loss = nn.functional.cross_entropy
task = Task(
    name="arrays", model=lambda: nn.Linear(4, 2), loss=loss, data=lambda: Splits(train=Rows()),
    learning_rate=0.1, batch_size=4, epochs=1, metrics=loss_metrics(loss),
)
"""


def test_array_data_set_is_batched_as_by_a_loader(say: Say, tmp_path: Path) -> None:
    (tmp_path / "arrays.py").write_text(ARRAYS)
    code, out, err = say("export arrays:task --format torchscript --json")
    assert code == 0, err
    assert set(json.loads(out)["max_differences"]) == {"1", "7"}
