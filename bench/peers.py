"""Images a second of Paceline, Lightning, Accelerate and a loop by hand: two workers, one run.

    python bench/peers.py [--rounds 8] [--steps 20] [--write]        (pip install -e '.[peers]')

LeNet, global batch 256, SGD, fp32, the same data set, two processes with one thread each. All are
alive at once and take blocks of steps in turn; who is not asked waits. Each is written and started
as its own documentation has it; the first process of each holds its loop at a step's border until
it is asked. The processes that trained are counted and must be two. Writes results/peers.md.
"""

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from table import machine, spread, write_table
from worlds import Tensors, as_it_is, make_model

HERE = Path(__file__).resolve()
BATCH, WORLD, LEARNING_RATE = 256, 2, 0.01
loss_of = nn.functional.cross_entropy


class Turn:
    """Holds the first process's loop before each step until the bench asks for it."""

    def __init__(self, folder: str, rank: int) -> None:
        (Path(folder) / f"pid-{os.getpid()}").touch()
        self._file: Any = None
        self._left = 0
        self._start_s = 0.0
        if rank == 0:
            channel = socket.socket(socket.AF_UNIX)
            channel.connect(f"{folder}/socket")
            self._file = channel.makefile("rw")

    def wait(self) -> None:
        """Before each step, and once after the last one."""
        if self._file is None:
            return
        if self._left == 0:
            if self._start_s:
                self._file.write(json.dumps(time.perf_counter() - self._start_s) + "\n")
                self._file.flush()
            self._left = int(self._file.readline() or 0)
            self._start_s = time.perf_counter()
        self._left -= 1


def data(batch_size: int = BATCH // WORLD, **options: Any) -> DataLoader[Any]:
    return DataLoader(
        Tensors((1, 28, 28)), batch_size=batch_size, collate_fn=as_it_is, drop_last=True, **options
    )


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)


def be_by_hand(turn: Turn, total: int, rank: int) -> None:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    model = DistributedDataParallel(make_model("lenet"), gradient_as_bucket_view=True)
    optimizer = sgd(model)
    loader = data(sampler=DistributedSampler(Tensors((1, 28, 28)), shuffle=True))
    done = 0
    while done < total:
        for inputs, targets in loader:
            turn.wait()
            optimizer.zero_grad()
            loss_of(model(inputs), targets).backward()
            optimizer.step()
            done += 1
            if done == total:
                break
    turn.wait()
    dist.destroy_process_group()


def be_accelerate(turn: Turn, total: int, rank: int) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = make_model("lenet")
    model, optimizer, loader = accelerator.prepare(model, sgd(model), data(shuffle=True))
    done = 0
    while done < total:
        for inputs, targets in loader:
            turn.wait()
            optimizer.zero_grad()
            accelerator.backward(loss_of(model(inputs), targets))
            optimizer.step()
            done += 1
            if done == total:
                break
    turn.wait()


def be_lightning(turn: Turn, total: int, rank: int) -> None:
    import lightning

    class Lit(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model("lenet")

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            inputs, targets = batch
            return loss_of(self.model(inputs), targets)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self.model)

    class Held(lightning.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            turn.wait()

    trainer = lightning.Trainer(
        accelerator="cpu", devices=WORLD, strategy="ddp", max_steps=total, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[Held()],
    )  # fmt: skip
    trainer.fit(Lit(), data(shuffle=True))
    turn.wait()


def be_paceline(turn: Turn, total: int, rank: int) -> None:
    import paceline

    pace = paceline.connect()
    model = make_model("lenet")
    model, optimizer, loader = pace.prepare(model, sgd(model), data(BATCH, shuffle=True))
    done = 0
    for _ in pace.epochs(1_000_000):
        for inputs, targets in loader:
            turn.wait()
            with pace.step():
                optimizer.zero_grad()
                loss_of(model(inputs), targets).backward()
                optimizer.step()
            done += 1
            if done == total:
                turn.wait()
                pace.stop()


ROLES = {
    "hand-written DDP": be_by_hand,
    "Accelerate": be_accelerate,
    "Lightning": be_lightning,
    "Paceline, --fast none": be_paceline,
    "Paceline, --fast auto": be_paceline,
}


def command_of(role: str, folder: str) -> list[str]:
    """How each is started; on CPUs Accelerate's own launcher wants MPI, its pages name torchrun."""
    python = sys.executable
    if role.startswith("Paceline"):
        fast = role.rpartition(" ")[2]
        flags = ["--workers", str(WORLD), "--fast", fast, "--run-dir", f"{folder}/run"]
        return [python, "-m", "paceline", "launch", *flags, str(HERE)]
    if role == "Lightning":
        return [python, str(HERE)]
    return [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORLD),
            str(HERE)]  # fmt: skip


class Contender:
    """One of them, started and waiting."""

    def __init__(self, role: str, total: int) -> None:
        self.role = role
        self._folder = tempfile.TemporaryDirectory()
        folder = self._folder.name
        server = socket.socket(socket.AF_UNIX)
        server.bind(f"{folder}/socket")
        server.listen(1)
        server.settimeout(240)
        own = ["--role", role, "--folder", folder, "--total", str(total)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        self._log = open(f"{folder}/log", "w")  # noqa: SIM115  it lives as long as the process
        self._process = subprocess.Popen(
            [*command_of(role, folder), *own], env=environment, stdout=self._log, stderr=self._log,
            start_new_session=True,
        )  # fmt: skip
        try:
            self._channel, _ = server.accept()
        except TimeoutError:
            raise SystemExit(f"{role} did not start:\n{Path(folder, 'log').read_text()}") from None
        self._file = self._channel.makefile("rw")

    def block_s(self, num_steps: int) -> float:
        self._file.write(f"{num_steps}\n")
        self._file.flush()
        return float(json.loads(self._file.readline())) / num_steps

    @property
    def num_processes(self) -> int:
        return len(list(Path(self._folder.name).glob("pid-*")))

    def said(self) -> list[str]:
        """What Paceline's trial found; it stands in the plan."""
        text = Path(self._folder.name, "log").read_text()
        return [line for line in text.splitlines() if "fast:" in line]

    def end(self) -> None:
        self._channel.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, 9)
        self._folder.cleanup()


def measure(rounds: int, steps: int) -> Iterator[tuple[Contender, list[float]]]:
    # The warm-up block and the first round's compiling steps do not count.
    contenders = [Contender(role, steps * (rounds + 1)) for role in ROLES]
    times: dict[str, list[float]] = {role: [] for role in ROLES}
    for number in range(rounds + 1):
        first = number % len(contenders)
        for one in (*contenders[first:], *contenders[:first]):
            seconds = one.block_s(steps)
            if number:
                times[one.role].append(seconds)
    for one in contenders:
        assert one.num_processes == WORLD, f"{one.role}: {one.num_processes} processes"
        yield one, times[one.role]
        one.end()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--write", action="store_true")
    for name in ("--role", "--folder"):
        parser.add_argument(name, default="", help=argparse.SUPPRESS)
    parser.add_argument("--total", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        rank = int(os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or 0)
        torch.set_num_threads(1)
        ROLES[options.role](Turn(options.folder, rank), options.total, rank)
        return
    note = machine()
    found = {one.role: (times, one.num_processes, one.said()) for one, times in
             measure(options.rounds, options.steps)}  # fmt: skip
    rows, said = [], []
    for role, (times, count, lines) in found.items():
        rates = [BATCH / one for one in times]
        beside = [
            spread([theirs / mine for theirs, mine in zip(other, times, strict=True)], 3)
            for name, (other, _, _) in found.items() if not name.startswith("Paceline")
        ]  # fmt: skip
        rows.append([role, str(count), spread([1000 * one for one in times]), spread(rates, 0),
                     *beside])  # fmt: skip
        said += [
            f"    {line.strip()}" for line in lines if " in /" not in line and " from /" not in line
        ]
        print(" | ".join(rows[-1]), flush=True)
    versions = ", ".join(f"{name} {_version(name)}" for name in ("lightning", "accelerate"))
    header = ["loop", "processes", "ms a step", "images/s",
              *(f": {name}" for name in found if not name.startswith("Paceline"))]  # fmt: skip
    if options.write:
        lines = "\n".join(["What `--fast auto` found:", "", *said, ""]) if said else ""
        write_table("peers", "Two workers beside the peers, LeNet 256", header, rows,
                    f"{lines}\n{options.rounds} interleaved blocks of {options.steps} steps; "
                    "median (least to most); last columns: images/s over theirs; "
                    f"{versions}. {note}")  # fmt: skip


def _version(name: str) -> str:
    from importlib.metadata import version

    return version(name)


if __name__ == "__main__":
    main()
