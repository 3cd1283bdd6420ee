"""A member is probed for its current line: a computing member survives any number of probes."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.engines.local import stack
from paceline.engines.local.stack import StackProbe, is_foreign

MEMBER = """
import collections, ctypes, itertools, sys, time
from paceline.engines.local.stack import show_standing
show_standing(int(sys.argv[1]))
print("ready", flush=True); time.sleep(0.2)
{does}
"""
COMPUTES = "[None for _ in iter(lambda: time.time() < 0, True)]"  # calls, and nothing but calls
WAITS_IN_C = "while True: ctypes.PyDLL(None).sleep(600)"
COMPUTES_IN_C = "collections.deque(itertools.repeat(0), maxlen=0)"


@pytest.fixture
def asked(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[StackProbe]:
    """A probe of a process that does this."""
    (tmp_path / "member.py").write_text(MEMBER.format(does=request.param))
    probe = StackProbe()
    member = subprocess.Popen(
        [sys.executable, tmp_path / "member.py", str(probe.fd)],
        pass_fds=[probe.fd], stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert member.stdout is not None
    member.stdout.readline()
    time.sleep(0.5)
    probe.pid = member.pid
    yield probe
    assert member.poll() is None
    member.kill()
    member.communicate()
    probe.close()


@pytest.mark.parametrize("asked", [COMPUTES], indirect=True)
def test_a_computing_member_survives_five_thousand_stack_probes(
    asked: StackProbe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler in C that reads the frames at any moment ends it after some two hundred."""
    with monkeypatch.context() as patch:
        patch.setattr(stack, "_ANSWER_S", 0.0)
        for _ in range(5000):
            asked.describe()
    assert asked.describe().startswith("it is at member.py:6 in ")


@pytest.mark.parametrize("asked", [WAITS_IN_C, COMPUTES_IN_C], indirect=True)
def test_a_member_in_c_code_is_reported_at_the_calling_line(
    asked: StackProbe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stack, "_ANSWER_S", 1.5)  # a machine that is busy takes its time
    assert asked.describe("hangs") == "it hangs at member.py:6 in <module>"


def test_a_script_below_pythons_own_folder_is_the_users() -> None:
    """As /usr/src/app of an image whose Python is the system's."""
    prefix = sys.base_prefix
    assert not is_foreign(f"{prefix}/src/app/train.py")
    assert not is_foreign(f"{prefix}project/train.py")
    assert not is_foreign(f"{os.path.dirname(os.__file__)}-mine/train.py")
    foreign = [json.__file__, pytest.__file__, stack.__file__, "<frozen runpy>"]
    foreign.append("/usr/lib/python3/dist-packages/numpy/linalg.py")
    assert [path for path in foreign if not is_foreign(path)] == []
