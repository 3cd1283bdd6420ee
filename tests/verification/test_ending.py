"""A script run only for its updates ends after them, cleanly."""

import sys
from pathlib import Path

import pytest

from paceline.verification.ending import end_with_loop, run_for_updates

SCRIPT = """\
import sys
from paceline.verification.ending import end_with_loop

try:
    for number in end_with_loop(lambda: iter(range(3)))():
        print(number, file=open(sys.argv[1], "a"))
    print("behind its loop", file=open(sys.argv[1], "a"))
except Exception:
    print("caught", file=open(sys.argv[1], "a"))
finally:
    print("left in order", file=open(sys.argv[1], "a"))
"""


@pytest.fixture(autouse=True)
def arguments_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_code_after_the_loop_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    message = tmp_path / "said.txt"
    run_for_updates(str(tmp_path / "train.py"), [str(message)])
    assert message.read_text().split("\n") == ["0", "1", "2", "left in order", ""]


def test_other_exit_of_a_script_is_reported(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys; sys.exit(int(sys.argv[1]))")
    run_for_updates(str(tmp_path / "train.py"), ["0"])
    with pytest.raises(SystemExit) as ended:
        run_for_updates(str(tmp_path / "train.py"), ["3"])
    assert ended.value.code == 3


def test_loop_runs_all_its_iterations() -> None:
    turns = end_with_loop(lambda n: iter(range(n)))(2)
    assert [next(turns), next(turns)] == [0, 1]
