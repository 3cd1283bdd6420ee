"""Scripts under torchrun as tests need them: real ranks over gloo, in a folder of their own.

It must not know what tests assert.
"""

import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen

from forked import Forked
from own_tree import python_path
from paceline.report.summary import summarize
from runs import Run

SCRIPT = """
import os, signal, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import paceline

mode, rank = os.environ.get("MODE", ""), int(os.environ.get("RANK", 0))
is_first_start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
pace = paceline.connect()
torch.manual_seed(3)
generator = torch.Generator().manual_seed(1)
has_norm = "NORM" in os.environ  # which cannot be of one sample
inputs = torch.randn(64 if has_norm else 61, 6, generator=generator, dtype=torch.float64)
targets = inputs[:, :3].argmax(1)
width = 8 + (rank if mode == "other models" else 0)


if mode == "other devices" and rank == 1:
    from paceline.script.prepared import Prepared

    own = Prepared._describe
    Prepared._describe = lambda *given: own(*given) | {"device": "cuda:0"}


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, width), nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width) if has_norm else nn.Identity()
        self.out = nn.Linear(width, 3)
        self.third = nn.Linear(width, width)
        self.third.weight = self.second.weight
        self.out.bias.requires_grad_(False)
        self.double()

    def forward(self, x):
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        return self.out(self.norm(torch.tanh(self.third(x))))


model = Tied()
with pace.once() as is_first:
    if is_first:
        time.sleep(0.2)
        open("first", "a").write(f"{rank}\\n")
matrices = [one for one in model.parameters() if one.ndim > 1]
vectors = [one for one in model.parameters() if one.ndim == 1]
optimizer = torch.optim.Adam([{"params": matrices}, {"params": vectors, "lr": 0.02}], lr=0.05)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.7)
loader = DataLoader(TensorDataset(inputs, targets), batch_size=12, shuffle=True)
test = DataLoader(TensorDataset(inputs[:17], targets[:17]), batch_size=4)
model, optimizer, loader, schedule = pace.prepare(model, optimizer, loader, schedule)
steps = 0
for epoch in pace.epochs(int(os.environ.get("EPOCHS", 2))):
    for i, (x, y) in enumerate(loader):
        if (mode == "all leave" or mode == "one leaves" and rank == 1) and i == 2:
            break
        with pace.step() as step:
            steps += 1
            if mode == "slow":
                time.sleep(0.05)
            if mode == "raise" and steps == 4 and rank == 1:
                raise ValueError("oh no")
            if mode == f"kill {rank}" and steps == 9 and is_first_start:
                time.sleep(0.5)
                os.kill(os.getpid(), signal.SIGKILL)
            if mode == "skip":
                step.skip()
                continue
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            if mode == "twice":
                (0.25 * loss).backward(retain_graph=True)
                loss = 0.75 * loss
            loss.backward()
            pace.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        schedule.step()

    def measure(batch):
        return {"acc": (float((model(batch[0]).argmax(1) == batch[1]).sum()), len(batch[1]))}

    totals = pace.evaluate(measure, test)
    pace.log({"ranks": pace.sum(rank + 1)})
    pace.print(f"epoch {epoch} version {pace.version} acc {totals['acc'][0]:.0f} of "
               f"{totals['acc'][1]:.0f} rate {optimizer.param_groups[0]['lr']:.6f}")
pace.save()
if mode == "needs batches":
    losses = [1.0 for _ in loader]
    print(sum(losses) / len(losses))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The outcome of the processes.

    Attributes:
        said: their output and torchrun's, in one.
    """

    folder: Path
    code: int
    said: str
    took_s: float

    @property
    def errors(self) -> list[str]:
        """The reported causes."""
        return [line for line in self.said.splitlines() if line.startswith("error: ")]

    @property
    def run(self) -> Run:
        return Run(folder=self.folder / "run", summary=summarize(self.folder / "run"))


def environment(folder: Path, settings: Mapping[str, str]) -> dict[str, str]:
    """The environment of a rank, with the folder of the run."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PACELINE_RUN_DIR": str(folder / "run"),
        **settings,
        "PYTHONPATH": python_path(settings.get("PYTHONPATH", "")),
    }


def begin(
    folder: Path, num_ranks: int, *words: str, by_python: bool = False, **settings: str
) -> "Forked | Popen[str]":
    """Start torchrun on ``train.py``.

    Args:
        words: flags of torchrun, and ``-m MODULE ARGS`` in place of the script.
        by_python: begin python for torchrun, which does so for its ranks; else all are forked.
        settings: variables of the environment.
    """
    (folder / "train.py").write_text(SCRIPT)
    what = () if "-m" in words else (str(folder / "train.py"),)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    all_words, env = [*torchrun, *words, *what], environment(folder, settings)
    if not by_python:
        return Forked(all_words, cwd=folder, env=env, stdout=PIPE, stderr=STDOUT)
    words_of_python = [sys.executable, *all_words]
    return Popen(words_of_python, cwd=folder, env=env, stdout=PIPE, stderr=STDOUT, text=True)


def end(process: "Forked | Popen[str]", folder: Path, within_s: float = 100.0) -> Ended:
    start = time.monotonic()
    output, _ = process.communicate(timeout=within_s)
    assert process.returncode is not None
    return Ended(
        folder=folder, code=process.returncode, said=output, took_s=time.monotonic() - start
    )


def run_ranks(
    folder: Path, num_ranks: int, *words: str, by_python: bool = False, **settings: str
) -> Ended:
    return end(begin(folder, num_ranks, *words, by_python=by_python, **settings), folder)


def interrupt(process: "Forked | Popen[str]", number: signal.Signals) -> None:
    process.send_signal(number)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def run_alone(folder: Path, ranks: list[dict[str, str]], script: str = SCRIPT) -> list[Ended]:
    """Processes as srun or mpirun starts them, each with its own variables."""
    (folder / "train.py").write_text(script)
    processes = [
        Forked(
            ["train.py"], cwd=folder, env=environment(folder, settings), stdout=PIPE, stderr=STDOUT
        )
        for settings in ranks
    ]
    return [end(process, folder) for process in processes]


def run_by_mpirun(folder: Path, num_ranks: int, script: str = SCRIPT, **settings: str) -> Ended:
    """The same in one call: without the process of torchrun, which takes seconds to start."""
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    world = {**settings, **meet, "OMPI_COMM_WORLD_SIZE": str(num_ranks)}
    ended = run_alone(
        folder,
        [
            {**world, "OMPI_COMM_WORLD_RANK": str(rank), "RANK": str(rank)}
            for rank in range(num_ranks)
        ],
        script,
    )
    return Ended(
        folder=folder,
        code=max(one.code for one in ended),
        said="".join(one.said for one in ended),
        took_s=max(one.took_s for one in ended),
    )
