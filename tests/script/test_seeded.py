"""Members begin with the same random state; a seed set by the script is never overridden."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runs import run_script

DRAWS = """
import random
import numpy as np, torch
def draws():
    return [random.random(), float(np.random.random()), float(torch.rand(()))]
"""

SEEDED = """
random.seed(3), np.random.seed(4), torch.manual_seed(5)
"""

PLAIN = f"{DRAWS}{SEEDED}print(draws(), draws())"

LONE = f"""
import paceline
{DRAWS}{SEEDED}
pace = paceline.connect()
assert pace.seed == 0
print(draws(), draws())
"""

SCRIPT = """
import paceline
{draws}
first = draws()
{seeded}
pace = paceline.connect()
with open(f"draws-{{pace.worker}}", "w") as file:
    print(first, file=file)
    print(draws(), draws(), file=file)
data = torch.utils.data.TensorDataset(torch.randn(16, 4))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(data, batch_size=8)
model, optimizer, loader = pace.prepare(model, optimizer, loader)
for _ in pace.epochs(1):
    for (inputs,) in loader:
        with pace.step():
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
"""


def python(code: str, folder: Path) -> str:
    (folder / "script.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout


def drawn(folder: Path, patch: pytest.MonkeyPatch, seeded: str, **settings: Any) -> list[str]:
    """The draws of each of two members: at its start, and from ``connect`` on."""
    folder.mkdir(exist_ok=True)
    patch.chdir(folder)
    (folder / "train.py").write_text(SCRIPT.format(draws=DRAWS, seeded=seeded))
    run_script(folder / "train.py", folder, workers=2, **settings)
    return [(folder / f"draws-{worker}").read_text() for worker in range(2)]


def test_connect_touches_no_generator_under_plain_python(tmp_path: Path) -> None:
    assert python(LONE, tmp_path) == python(PLAIN, tmp_path)


@pytest.mark.parametrize("engine", ["local", "inline"])
def test_connect_keeps_the_scripts_seed(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = python(PLAIN, tmp_path)
    for told in drawn(tmp_path, monkeypatch, SEEDED, engine=engine):
        assert told.splitlines()[1] + "\n" == wanted


@pytest.mark.parametrize("engine", ["local", "inline"])
def test_members_start_with_the_seed_of_the_run(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = drawn(tmp_path, monkeypatch, "", engine=engine, seed=1)
    assert first == second
    again = drawn(tmp_path / "again", monkeypatch, "", engine=engine, seed=1)
    assert again == [first, first]
    another = drawn(tmp_path / "another", monkeypatch, "", engine=engine, seed=2)
    assert another[0] != first
