"""For all tests: live runs of one test process share a fork server, so that torch is imported once;
a test process computes in one thread, as there are several of them.

How a run begins by itself is tested where runs are commands: tests/cli, tests/faults. Ranks and
scripts are forked likewise, where a test asks for their result: tests/support/forked.py.
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
"""Before torch's compiler is imported, here or in a process of a test: of a function or two that a
test compiles, processes to compile in and headers compiled beforehand would take most of the time.
"""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported and collected stays to the end: no test's garbage is looked for in it.

    Ten thousand tests are 600,000 objects, and 0.3 s each time that all are looked through.
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
    """What the user keeps of this machine, and of other runs, is not for tests to read or write."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def warm_fork_server(suite_cache: None) -> Iterator[None]:
    with warm():
        yield


@pytest.fixture(scope="module", autouse=True)
def frozen_modules() -> Iterator[None]:
    """What a module's tests have imported stays as well: nobody looks through it in the next."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def own_process() -> Iterator[None]:
    """A test changes the process for itself alone.

    Threads of several tests at once would wait for each other's cores; some set their number. Tasks
    of a test's own folder are found there: a thousand folders more on the path slow each import.
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
    """Run the command line: exit code, standard output, standard error."""
    monkeypatch.chdir(tmp_path)

    def run(line: str) -> tuple[int, str, str]:
        code = command.run(shlex.split(line))
        return code, *capsys.readouterr()

    return run
