"""Fixtures of all tests: live runs of a test process share a fork server, so that torch is imported
once; a test process computes in one thread, since several run at once.

The usual start of a run is tested where runs are commands: tests/cli, tests/faults. Ranks and
scripts are forked likewise where only their result is tested: tests/support/forked.py.
"""

import gc
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from own_tree import python_path
from paceline.cli import app as command
from paceline.engines.local.client import warm

os.environ["PYTHONPATH"] = python_path()
os.environ |= {
    "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}
"""Set before torch's compiler is imported, here or in a process of a test: for the few functions a
test compiles, compile processes and precompiled headers would take most of the time.
"""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Freeze imported and collected objects, so that no garbage collection of a test scans them.

    Ten thousand tests are 600,000 objects, and a scan of all takes 0.3 s.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def suite_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep tests away from the user's cache of this machine and of other runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def warm_fork_server(suite_cache: None) -> Iterator[None]:
    with warm():
        yield


@pytest.fixture(scope="module", autouse=True)
def frozen_modules() -> Iterator[None]:
    """Freeze the imports of a test module, so that later ones do not scan them."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def own_process() -> Iterator[None]:
    """Undo the changes of a test to the process.

    Threads of parallel tests would wait for each other's cores; some set their number. Tasks in a
    test's folder are found through the path, and a thousand such folders would slow each import.
    """
    before, path = torch.get_num_threads(), sys.path[:]
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    sys.path[:] = path


@pytest.fixture
def say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[str], tuple[int, str, str]]:
    """Run the command line; return exit code, standard output and standard error."""
    monkeypatch.chdir(tmp_path)

    def run(line: str) -> tuple[int, str, str]:
        code = command.run(shlex.split(line))
        return code, *capsys.readouterr()

    return run
