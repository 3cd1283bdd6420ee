"""Several ways of training the same thing, alive at once, run in turn block by block.

A world is one or more processes that train the same model on the same batches. Its main process
waits for a number of steps on a pipe, makes them, and answers with the seconds; the others follow
because they wait for it. So variants are interleaved (A B A B) on a machine that is noisy.

Roles, one a process:  `ddp`  `pace`  `one` (one process, all threads)
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

Step = Callable[[], None]
HERE = Path(__file__).resolve()
NUM_SAMPLES = 16384
LEARNING_RATE = 0.0001


class Tensors(Dataset[Any]):
    """In memory; a batch is one index_select."""

    def __init__(self, shape: tuple[int, ...], num_samples: int = NUM_SAMPLES) -> None:
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.rand(num_samples, *shape, generator=generator)
        self.targets = torch.randint(0, 10, (num_samples,), generator=generator)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        chosen = torch.tensor(indices)
        return self.inputs[chosen], self.targets[chosen]


def as_it_is(batch: Any) -> Any:
    return batch


def make_model(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    """The model and the shape of one input; torch's own initialisation, seed 0."""
    torch.manual_seed(0)
    if name == "mlp":
        layers = [nn.Flatten(), nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(2048, 10)), (784,)
    from paceline.workloads import load_task

    task = load_task(name, 1, "default")
    return task.model(), (1, 28, 28)


class Part:
    """Positions of one rank in every batch, epoch after epoch: what Paceline hands to it, too."""

    def __init__(self, batch_size: int, rank: int, world: int) -> None:
        self.batch_size, self.rank, self.world = batch_size, rank, world

    def __iter__(self) -> Iterator[list[int]]:
        for start in range(0, NUM_SAMPLES, self.batch_size):
            first = start + self.batch_size * self.rank // self.world
            last = start + self.batch_size * (self.rank + 1) // self.world
            yield list(range(first, last))


def endless(loader: DataLoader[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def plain_steps(model: nn.Module, shape: tuple[int, ...], part: Part) -> Step:
    """The bare loop: what everybody writes."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    loader = DataLoader(Tensors(shape), batch_sampler=part, collate_fn=as_it_is)  # type: ignore[arg-type]
    batches = endless(loader)
    loss_fn = nn.CrossEntropyLoss()

    def step() -> None:
        inputs, targets = next(batches)
        optimizer.zero_grad()
        loss_fn(model(inputs), targets).backward()
        optimizer.step()

    return step


# -- the roles ---------------------------------------------------------------------------------


def answer(channel: socket.socket, step: Step, parameters: list[Tensor]) -> None:
    """Make as many steps as asked for, until told to end; then save the parameters."""
    file = channel.makefile("rw")
    for line in file:
        order = json.loads(line)
        if order["steps"] == 0:
            torch.save([one.detach().clone() for one in parameters], order["save"])
            file.write("{}\n")
            file.flush()
            return
        start = time.perf_counter()
        for _ in range(order["steps"]):
            step()
        file.write(json.dumps({"seconds": time.perf_counter() - start}) + "\n")
        file.flush()


def be_one(options: argparse.Namespace, channel: socket.socket) -> None:
    torch.set_num_threads(options.world)
    model, shape = make_model(options.model)
    step = plain_steps(model, shape, Part(options.batch, 0, 1))
    answer(channel, step, list(model.parameters()))


def be_ddp(options: argparse.Namespace, channel: socket.socket | None) -> None:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{options.rendezvous}", rank=options.rank,
        world_size=options.world,
    )  # fmt: skip
    part = Part(options.batch, options.rank, options.world)

    def build(cap: int, view: bool, static: bool) -> tuple[nn.Module, Step]:
        model, shape = make_model(options.model)
        wrapped = DistributedDataParallel(
            model, bucket_cap_mb=cap, gradient_as_bucket_view=view, static_graph=static
        )
        return model, plain_steps(wrapped, shape, part)

    best, best_s = (25, True, False), float("inf")
    grid = [(c, v, s) for c in (1, 25, 100) for v in (False, True) for s in (False, True)]
    for choice in grid if options.tune else []:
        _, step = build(*choice)
        seconds = min(_timed(step, options.tune) for _ in range(2))
        worst = torch.tensor([seconds])
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        if worst.item() < best_s:
            best, best_s = choice, worst.item()
    model, step = build(*best)
    if channel is None:
        for _ in range(options.total):
            step()
    else:
        channel.sendall((json.dumps({"best": best}) + "\n").encode())
        answer(channel, step, list(model.parameters()))
    dist.barrier()


def _timed(step: Step, count: int) -> float:
    step()
    start = time.perf_counter()
    for _ in range(count):
        step()
    return time.perf_counter() - start


def be_pace(options: argparse.Namespace) -> None:
    """Under ``paceline launch`` or plain ``python``: the loop of the README."""
    import paceline

    if "LOCAL_RANK" not in os.environ:
        torch.set_num_threads(options.world)
    pace = paceline.connect()
    model, shape = make_model(options.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    loader = DataLoader(Tensors(shape), batch_size=options.batch, collate_fn=as_it_is)
    model, optimizer, loader = pace.prepare(model, optimizer, loader)
    loss_fn = nn.CrossEntropyLoss()

    def loop() -> Iterator[None]:
        for _ in pace.epochs(1_000_000):
            for inputs, targets in loader:
                with pace.step():
                    optimizer.zero_grad()
                    loss_fn(model(inputs), targets).backward()
                    optimizer.step()
                yield

    steps = loop()
    if pace.is_main:
        channel = _connect(options.answer_to)
        answer(channel, lambda: next(steps), list(model.parameters()))
    else:
        for _ in range(options.total):
            next(steps)
    pace.stop()
    for _ in steps:
        pass


def _connect(address: str) -> socket.socket:
    channel = socket.socket(socket.AF_UNIX)
    channel.connect(address)
    return channel


# -- the bench's side --------------------------------------------------------------------------


class World:
    """One variant, started and waiting for steps."""

    def __init__(
        self, role: str, *, model: str, batch: int, total: int, world: int = 2, tune: int = 0,
        protocol: str = "full-sync", launched: bool = True, extra: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        self.role = role
        self._folder = tempfile.TemporaryDirectory()
        address = f"{self._folder.name}/socket"
        server = socket.socket(socket.AF_UNIX)
        server.bind(address)
        server.listen(1)
        own = [
            str(HERE), "--role", role, "--model", model, "--batch", str(batch), "--total",
            str(total), "--world", str(world), "--tune", str(tune), "--answer-to", address,
            "--rendezvous", f"{self._folder.name}/rendezvous",
        ]  # fmt: skip
        python = [sys.executable]
        if role == "pace" and launched:
            launch = [
                "-m", "paceline", "launch", "--workers", str(world), "--protocol", protocol,
                "--run-dir", f"{self._folder.name}/run", *extra,
            ]  # fmt: skip
            commands = [[*python, *launch, *own]]
        elif role == "ddp":
            commands = [[*python, *own, "--rank", str(rank)] for rank in range(world)]
        else:
            commands = [[*python, *own]]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"} if role == "ddp" else None
        self._processes = [
            subprocess.Popen(one, stdout=subprocess.DEVNULL, env=environment) for one in commands
        ]
        server.settimeout(600)
        self._channel, _ = server.accept()
        self._file = self._channel.makefile("rw")
        self.best = json.loads(self._file.readline())["best"] if role == "ddp" else None

    def steps(self, count: int) -> float:
        """Make ``count`` steps; the seconds that they took."""
        self._file.write(json.dumps({"steps": count}) + "\n")
        self._file.flush()
        return float(json.loads(self._file.readline())["seconds"])

    def end(self) -> list[Tensor]:
        """The parameters at the end; all processes are gone."""
        path = f"{self._folder.name}/parameters.pt"
        self._file.write(json.dumps({"steps": 0, "save": path}) + "\n")
        self._file.flush()
        self._file.readline()
        tensors: list[Tensor] = torch.load(path)
        for process in self._processes:
            process.wait(60)
        self._folder.cleanup()
        return tensors


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, kind in {
        "role": str, "model": str, "batch": int, "total": int, "world": int, "rank": int,
        "tune": int, "answer-to": str, "rendezvous": str,
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=kind)
    options = parser.parse_args()
    if options.role == "pace":
        be_pace(options)
    elif options.role == "one":
        be_one(options, _connect(options.answer_to))
    else:
        be_ddp(options, _connect(options.answer_to) if options.rank == 0 else None)


if __name__ == "__main__":
    main()
