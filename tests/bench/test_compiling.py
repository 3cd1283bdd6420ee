"""The same work in several ways: derived figures, failures of single ways, and turns."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.bench.compiling import ROUNDS, WaysQuestion, compare_ways, render_ways
from paceline.bench.samples import Timing, gain_of
from paceline.errors import ConfigError

Say = Callable[[str], tuple[int, str, str]]
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler: g++")
ODD = """
from torch import nn
from paceline.data.arrays import ArrayDataset, Splits
from paceline.workloads.base import Task, loss_metrics
import torch

class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        open("/dev/null").close()
        return self.layer(x)

def data():
    return Splits(train=ArrayDataset(torch.randn(8, 4), torch.zeros(8)))

def loss(outputs, targets):
    return outputs.mean()

task = Task(
    name="odd", model=Odd, loss=loss, data=data, learning_rate=0.1, batch_size=4, epochs=1,
    metrics=loss_metrics(loss),
)
"""


def timing(*samples_s: float) -> Timing:
    return Timing(name="a way", samples_s=samples_s)


def test_gain_compares_blocks_pairwise() -> None:
    gain = gain_of(timing(2.0, 20.0, 2.0, 2.0), timing(1.0, 10.0, 1.0, 1.0))
    assert (gain.speedup, gain.call_s, gain.is_faster) == (2.0, 1.0, True)
    assert gain_of(timing(1.0, 1.0, 2.0, 2.0), timing(2.0, 2.0, 1.0, 1.0)).is_faster is None
    assert gain_of(timing(1.0, 1.0, 1.0, 2.0), timing(2.0, 2.0, 2.0, 1.0)).is_faster is False


@pytest.mark.timeout(600)
def test_ways_agree_and_break_even_follows_from_their_times() -> None:
    messages: list[str] = []
    question = WaysQuestion(ways=("eager", "script", "trace"), calls=ROUNDS)
    result = compare_ways(question, messages.append)
    eager, *others = result.results
    assert [one.way for one in result.results] == ["eager", "script", "trace"]
    assert eager.gain is None
    assert eager.once_s is not None
    for one in others:
        assert one.failure == ""
        assert one.max_difference is not None
        assert one.max_difference <= 1e-5
        assert one.call is not None
        assert len(one.call.samples_s) == ROUNDS
        assert one.peak_bytes is not None
        assert one.peak_bytes > 10_000_000
        assert one.gain is not None
        if one.gain.is_faster:
            assert one.break_even_calls is not None
            assert one.once_s is not None
            needed = (one.once_s - eager.once_s) / one.gain.call_s
            assert one.break_even_calls >= needed
        else:
            assert one.break_even_calls is None
    assert messages[0].startswith("eager: first call after ")


@needs_compiler
@pytest.mark.timeout(600)
def test_compiled_ways_run_and_recompilations_are_counted() -> None:
    question = WaysQuestion(subject="softmax", ways=("compile", "aoti"), calls=ROUNDS)
    result = compare_ways(question, lambda line: None)
    eager, compiled, packed = result.results
    assert [eager.failure, compiled.failure, packed.failure] == ["", "", ""]
    assert compiled.first_call_s is not None
    assert eager.first_call_s is not None
    assert compiled.first_call_s > 10 * eager.first_call_s
    # Batch 1 is compiled separately; 2 recompiles with a dynamic dimension, so 3 does not.
    assert compiled.recompiles == 1
    assert packed.recompiles is None
    assert len(packed.other_batches_s) == 2
    for one in (compiled, packed):
        assert one.max_difference is not None
        assert one.max_difference <= 1e-5
    text = "\n".join(render_ways(result))
    assert "1 recompiles" in text


@pytest.mark.timeout(600)
def test_failing_way_gives_its_reason_and_the_others_still_run(
    say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "oddtask.py").write_text(ODD)
    monkeypatch.setenv("CXX", "no-such-compiler")
    line = f"bench compile oddtask:task --ways eager,script,trace,compile --calls {ROUNDS}"
    line += " --threads 1"
    code, out, _ = say(f"{line} --json")
    assert code == 0
    rows = {way["way"]: way for way in json.loads(out)["ways"]}
    assert "no C++ compiler: no-such-compiler" in rows["compile"]["failure"]
    assert "open" in rows["script"]["failure"]  # the construct
    assert f"{tmp_path}/oddtask.py:13" in rows["script"]["failure"]  # and its line
    assert rows["eager"]["call"]["count"] == rows["trace"]["call"]["count"] == ROUNDS


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("bench compile --ways eagre", "did you mean 'eager'"),
        ("bench compile --batch-size 0", "--batch-size must be >= 1"),
        ("bench compile --calls 3", f"--calls must be >= {ROUNDS}"),
        ("bench compile --threads 0", "--threads must be >= 1"),
        ("bench compile --device cuda:7", "is not here"),
        ("bench compile lenett --ways eager", "did you mean 'lenet'"),
    ],
)
def test_invalid_options_are_refused(say: Say, line: str, said: str) -> None:
    code, _, err = say(line)
    assert code == 2
    assert said in err
    assert "Traceback" not in err


def test_model_that_does_not_run_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "oddtask.py").write_text(ODD.replace("self.layer(x)", "x.no_such_thing()"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"does not run: .*no_such_thing.*oddtask.py:14"):
        compare_ways(WaysQuestion(subject="oddtask:task", ways=("eager",)), lambda line: None)
