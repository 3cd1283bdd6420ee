"""A forked program behaves as under python; tests of ranks rely on this."""

import os
import subprocess
import sys
import time
from pathlib import Path
from subprocess import PIPE, STDOUT

import pytest

import forked
from forked import Forked
from own_tree import SRC

PROGRAM = """
import atexit, os, sys, threading, time

print(sys.argv, __name__, __file__, sys.path[0], os.getcwd(), os.environ.get("COLOUR"))
print(sys.modules["__main__"].__dict__ is globals(), sys.stdin.read())
print("wrong", file=sys.stderr)
atexit.register(print, "the last word")
threading.Thread(target=lambda: (time.sleep(0.2), print("a thread's word"))).start()
{end}
"""
ENDS = {
    "well": "",
    "by a number": "sys.exit(3)",
    "by a sentence": "sys.exit('no more')",
    "by an error": "def fails():\n    raise ValueError('oh no')\nfails()",
    "by a hook": "sys.excepthook = lambda *it: print(it[0], it[1])\nraise ValueError('oh no')",
    "by a signal": "sys.stdout.flush()\nos.kill(os.getpid(), 15)",
}


@pytest.mark.parametrize("end", ENDS)
def test_forked_program_behaves_as_under_python(tmp_path: Path, end: str) -> None:
    (tmp_path / "program.py").write_text(PROGRAM.format(end=ENDS[end]))
    words, env = ["program.py", "one", "-m"], {**os.environ, "COLOUR": "red"}
    by_python = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, env=env, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    by_fork = forked.run(words, cwd=tmp_path, env=env)
    assert by_fork.returncode == by_python.returncode
    assert by_fork.stderr == by_python.stderr
    assert by_fork.stdout == by_python.stdout


def test_unseeded_random_numbers_differ_each_time(tmp_path: Path) -> None:
    code = "print(random.random(), numpy.random.rand(), float(torch.rand(())))"
    (tmp_path / "draws.py").write_text(f"import random, numpy, torch\n{code}")
    first, second = (forked.run([tmp_path / "draws.py"]).stdout.split() for _ in range(2))
    assert all(one != other for one, other in zip(first, second, strict=True))


def test_forked_program_has_the_interface_of_popen(tmp_path: Path) -> None:
    (tmp_path / "sleeps.py").write_text("import time; print('begun', flush=True); time.sleep(60)")
    program = Forked([tmp_path / "sleeps.py"], stdout=PIPE, stderr=STDOUT)
    assert program.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        program.wait(0.1)
    with pytest.raises(subprocess.TimeoutExpired):
        program.communicate(0.5)
    program.kill()
    assert program.communicate() == ("begun\n", "")
    assert program.returncode == -9


def test_output_ends_when_no_process_can_write(tmp_path: Path) -> None:
    """As with a pipe: a process left behind is waited for."""
    code = "import os, sys, time\nif os.fork() == 0:\n    time.sleep(0.5)\n    print('late')"
    (tmp_path / "leaves.py").write_text(code)
    begun_s = time.monotonic()
    assert forked.run([tmp_path / "leaves.py"]).stdout == "late\n"
    assert time.monotonic() - begun_s > 0.5


def test_subprocess_imports_the_package_of_this_tree(tmp_path: Path) -> None:
    code = "import paceline; print(paceline.__file__)"
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()).parents[1] == SRC
