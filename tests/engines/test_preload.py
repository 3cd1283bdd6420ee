"""Modules that are imported once, before members are forked, and modules that are refused."""

import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.engines.local.preload import check_modules
from paceline.errors import ConfigError
from runs import nothing_left

Say = Callable[[str], tuple[int, str, str]]

SCRIPT = """\
import os, torch
from torch import nn
from torch.utils.data import DataLoader
import paceline
import HEAVY as heavy

pace = paceline.connect()
model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(torch.rand(16, 2), batch_size=4)
model, optimizer, loader = pace.prepare(model, optimizer, loader)
for epoch in pace.epochs(1):
    for x in loader:
        with pace.step():
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
open(f"worker-{pace.worker}", "w").write(f"{heavy.by} {os.getpid()}")
"""
_NEW = itertools.count()
HEAVY = """\
import os, threading, time
by = os.getpid()
with open(IMPORTED, "a") as file:
    file.write(f"{by}\\n")
"""


@pytest.fixture
def launch(say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Launch a script that imports a module, which records the importing process; the output.

    Its name is new: the process that imports modules outlives a test.
    """
    name = f"heavy_{os.getpid()}_{next(_NEW)}"
    monkeypatch.syspath_prepend(tmp_path / "modules")
    (tmp_path / "modules").mkdir()

    def run(flags: str, *, more: str = "", code: int = 0, run_dir: str = "run") -> str:
        imported = repr(str(tmp_path / "imported"))
        heavy = HEAVY.replace("IMPORTED", imported) + more
        (tmp_path / "modules" / f"{name}.py").write_text(heavy)
        (tmp_path / "train.py").write_text(SCRIPT.replace("HEAVY", name))
        flags = flags.replace("heavy", name)
        with nothing_left():
            result, out, err = say(f"launch --workers 2 --run-dir {run_dir} {flags} train.py")
        assert result == code, out + err
        assert "Traceback" not in out + err
        return (out + err).replace(name, "heavy")

    return run


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split()]


def test_a_preloaded_module_is_imported_once_for_all_workers(
    launch: Callable[..., str], tmp_path: Path
) -> None:
    launch("--preload heavy")
    (by,) = _numbers((tmp_path / "imported").read_text())
    told = [_numbers((tmp_path / f"worker-{seat}").read_text()) for seat in range(2)]
    assert [imported for imported, _ in told] == [by, by]
    assert by not in [own for _, own in told]
    assert not any(module.startswith("heavy") for module in sys.modules)


def test_the_next_run_has_no_modules_that_it_did_not_preload(
    launch: Callable[..., str], tmp_path: Path
) -> None:
    launch("--preload heavy")
    launch("", run_dir="next")
    for seat in range(2):
        by, own = _numbers((tmp_path / f"worker-{seat}").read_text())
        assert by == own


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("raise OSError('no licence')", "preload: heavy cannot be imported: OSError: no licence"),
        (
            "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
            "preload: importing heavy starts 1 thread",
        ),
    ],
    ids=["fails", "thread"],
)
def test_a_module_that_prevents_forking_is_refused_and_the_next_run_works(
    launch: Callable[..., str], tmp_path: Path, more: str, said: str
) -> None:
    assert said in launch("--preload heavy", more=more, code=2)
    assert not (tmp_path / "run").exists()
    launch("--preload heavy")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no_such_module", "no module named 'no_such_module'"),
        ("no_such.module", "no module named 'no_such'"),
        ("os; print(1)", "is not a module name"),
        (".relative", "is not a module name"),
        ("", "is not a module name"),
    ],
)
def test_an_invalid_module_name_is_refused_before_the_start(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_modules([name])


def test_an_engine_that_does_not_fork_refuses_preload(say: Say) -> None:
    code, _, err = say("train quadratic --engine inline --preload json")
    assert code == 2
    assert "engine 'inline' forks no workers" in err
