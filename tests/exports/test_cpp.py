"""The C++ program of the examples computes the same outputs from a file as Python.

The slowest test of the suite, and the only one that compiles against torch's headers: about half a
minute for them and half a minute for AOTInductor on an idle machine. It is a single test, so that
parallel pytest processes do not repeat it.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline.exports.subject import find_subject

Say = Callable[[str], tuple[int, str, str]]
CPP = Path(__file__).parents[2] / "examples" / "cpp"
COMPILER = next((name for name in ("g++", "c++", "clang++") if shutil.which(name)), "")


def build(program: Path) -> None:
    """Build the example as its Makefile does."""
    words = [f"PYTHON={sys.executable}", f"OUT={program}", f"CXX={COMPILER}", "CXXFLAGS=-O0"]
    done = subprocess.run(
        ["make", "-C", str(CPP), *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def run(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a program without Python on the path."""
    alone = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    return subprocess.run(words, capture_output=True, text=True, check=False, env=alone)


def numbers(text: str) -> Tensor:
    return torch.tensor([[float(word) for word in line.split()] for line in text.splitlines()])


@pytest.mark.timeout(1800)
@pytest.mark.skipif(not COMPILER, reason="no C++ compiler: g++, c++, clang++")
def test_cpp_program_prints_the_values_of_python(say: Say, tmp_path: Path) -> None:
    files = {}
    for name in ("torchscript", "aoti"):
        code, out, err = say(f"export lenet --format {name} --json")
        assert code == 0, err
        actual = json.loads(out)
        assert set(actual["max_differences"]) == {"1", "7"}
        assert max(actual["max_differences"].values()) <= 1e-5
        assert actual["num_bytes"] == Path(actual["path"]).stat().st_size > actual["weights_bytes"]
        files[name] = actual["path"]
    if not shutil.which("make"):
        pytest.skip("no make to build the example with")
    program = tmp_path / "predict"
    build(program)

    subject = find_subject("lenet")
    for batch in (1, 7):
        (inputs,) = subject.inputs(batch)
        inputs.numpy().tofile(tmp_path / "images.raw")
        shape = ",".join(str(size) for size in inputs.shape)
        with torch.no_grad():
            expected = subject.model(inputs)
        for path in files.values():
            done = run(str(program), path, "images.raw", shape)
            assert done.returncode == 0, done.stderr
            got = numbers(done.stdout)
            assert got.shape == expected.shape == (batch, 10)
            # Outputs of fresh weights are small, so the tolerance is 1e-5 of the largest one.
            assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()

    short = run(str(program), files["aoti"], "images.raw", "8,1,28,28")
    assert short.returncode == 2
    assert short.stderr == (
        "predict: images.raw must hold 25088 bytes for 8,1,28,28, it holds 21952\n"
    )
    absent = run(str(program), "absent.pt", "images.raw", "7,1,28,28")
    assert absent.returncode == 2
    assert absent.stderr.startswith("predict: open file failed")
    assert len(absent.stderr.splitlines()) <= 2
