"""A worker's subprocesses can be ended as those of any other script."""

from pathlib import Path

from runs import run_script

CHILDREN = """\
import signal
import subprocess
import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

import paceline

pace = paceline.connect()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2)
model, optimizer, loader = pace.prepare(model, optimizer, loader)
if pace.is_main:
    ends = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        child = subprocess.Popen(["sleep", "60"])
        child.send_signal(number)
        try:
            ends.append(child.wait(timeout=5))
        except subprocess.TimeoutExpired:
            child.kill()
            ends.append(f"{number} did nothing")
    with open(sys.argv[1], "w") as file:
        print(*ends, file=file)
for _ in pace.epochs(1):
    for (x,) in loader:
        with pace.step():
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
"""


def test_a_subprocess_of_a_worker_receives_signals(tmp_path: Path) -> None:
    script, ends = tmp_path / "children.py", tmp_path / "ends.txt"
    script.write_text(CHILDREN)
    run_script(script, tmp_path, str(ends), workers=2)
    assert ends.read_text().split() == ["-15", "-2", "-10", "-1"]
