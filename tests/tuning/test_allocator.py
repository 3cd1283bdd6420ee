"""Freed memory: returned as usual, or kept for the next step."""

import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from paceline.context import Context
from paceline.errors import ConfigError
from paceline.speed import Speed
from paceline.tuning import allocator, trial
from paceline.tuning.allocator import kept_process
from paceline.tuning.candidate import Objects
from paceline.tuning.candidates import KeptMemory
from paceline.tuning.fast import given_by_hand
from subjects import subject

HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
pytestmark = pytest.mark.skipif(
    not HUGE.exists() or "[always]" in HUGE.read_text(), reason="pages cannot be counted here"
)
PAGE = resource.getpagesize()
SIZE = 64 << 20


@pytest.fixture(autouse=True)
def as_usual() -> Iterator[None]:
    yield
    allocator.restore(False)


@pytest.mark.parametrize("is_kept", [False, True])
def test_kept_memory_is_requested_only_once(is_kept: bool) -> None:
    """In a separate process, because the heap here may have free space."""
    code = f"""if True:
        import resource
        import torch
        from paceline.tuning import allocator
        allocator.keep({is_kept})
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(30):
            torch.ones({SIZE}, dtype=torch.uint8)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    """
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    pages = int(done.stdout) / (30 * SIZE / PAGE)
    assert pages < 0.5 if is_kept else pages > 0.9  # the heap reaches its size in a few steps


def test_kept_process_restores_its_state_after_an_error() -> None:
    threads = torch.get_num_threads()

    def change() -> None:
        with kept_process():
            allocator.keep(True)
            torch.set_num_threads(threads + 1)
            raise KeyError

    with pytest.raises(KeyError):
        change()
    assert not allocator.is_kept()
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("is_kept", [False, True])
def test_trial_restores_the_allocator_setting(is_kept: bool) -> None:
    if is_kept:
        allocator.keep(True)
    given = Speed(keep_memory=is_kept)
    trial.try_all(subject(), given, (KeptMemory(),), budget_s=5.0)
    assert allocator.is_kept() == is_kept


def test_kept_memory_is_tried_once_and_only_on_a_cpu() -> None:
    assert KeptMemory().options(subject(), Speed()) == (True,)
    assert KeptMemory().options(subject(), Speed(keep_memory=True)) == ()
    assert KeptMemory().options(subject(device=torch.device("cuda")), Speed()) == ()


def test_allocator_settings_of_the_user_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=1000000000")
    assert KeptMemory().options(subject(), Speed()) == ()


def test_keep_memory_without_glibc_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator, "_library", lambda: None)
    assert KeptMemory().options(subject(), Speed()) == ()
    one = subject().objects
    with pytest.raises(ConfigError, match="--keep-memory always needs glibc"):
        KeptMemory().apply(Objects(model=one.model, optimizer=one.optimizer, sizes=one.sizes), True)


@pytest.mark.parametrize(
    ("asked", "is_own", "device", "kept"),
    [
        ("auto", True, "cpu", True),
        ("auto", False, "cpu", False),  # the user's process: plain python, a notebook
        ("auto", True, "cuda", False),
        ("never", True, "cpu", False),
        ("always", False, "cpu", True),
    ],
)
def test_worker_process_keeps_memory_by_default(
    asked: str, is_own: bool, device: str, kept: bool
) -> None:
    context = Context(keep_memory=asked, is_own_process=is_own)
    assert given_by_hand(context, subject(device=torch.device(device))).keep_memory is kept


def test_worker_does_not_override_allocator_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "100000")
    assert not given_by_hand(Context(is_own_process=True), subject()).keep_memory


@pytest.mark.parametrize(("flag", "said"), [("", "True"), ("--keep-memory never ", "False")])
def test_launched_worker_keeps_memory(
    flag: str, said: str, say: Callable[[str], tuple[int, str, str]], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(
        "import torch, paceline\n"
        "from paceline.tuning.allocator import is_kept\n"
        "pace = paceline.connect()\n"
        "model = torch.nn.Linear(2, 1)\n"
        "pace.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))\n"
        "pace.print('memory is kept:', is_kept())\n"
    )
    code, out, err = say(f"launch --workers 2 --device cpu {flag}train.py")
    assert code == 0, err
    assert f"memory is kept: {said}" in out
