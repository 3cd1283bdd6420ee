"""Several ways of training the same thing, alive at once, run in turn block by block.

A world is one or more processes that train the same model on the same batches. Its main process
waits for a number of steps on a pipe, makes them, and answers with the seconds; the others follow
because they wait for it. So variants are interleaved (A B A B) on a machine that is noisy.

Roles:  `ddp`  `pace`  `one` (one process, all threads)
        `bound` (each process its part of every batch, and no exchange at all)
        `read` (each process reads what another has just written, as much as a gradient)
A world can be held to some cores: its process of rank r computes on the r-th of them.
`ddp` and `pace` can go without a loader, too: each process then draws its part of every batch.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from paceline.trace import FILE_NAME, read_trace
from paceline.trace.records import Handed

Step = Callable[[], None]
HERE = Path(__file__).resolve()
NUM_SAMPLES = 16384
LEARNING_RATE = 0.0001


@dataclass(frozen=True, slots=True)
class Subject:
    """What is trained.

    Attributes:
        model: makes it, with torch's own initialisation.
        shape: of one input.
        tokens: 0 where inputs are numbers; else they are tokens below this one, and so are targets.
    """

    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    optimizer: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]
    num_samples: int = NUM_SAMPLES
    tokens: int = 0

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def sgd(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=0.9)


def adamw(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE)


def _mlp(*widths: int) -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _cnn() -> nn.Module:
    """Small, with batch norm: of 1 x 28 x 28."""
    layers: list[nn.Module] = []
    for before, after in ((1, 32), (32, 64)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
        layers += [nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 7 * 7, 10))


def _built_in(name: str) -> nn.Module:
    from paceline.workloads import load_task

    return load_task(name, 1, "default").model()


IMAGE = (1, 28, 28)
SUBJECTS = {
    "mlp": Subject(lambda: _mlp(784, 2048, 2048, 10), (784,), sgd),
    "deep": Subject(lambda: _mlp(784, *[1024] * 6, 10), (784,), sgd),
    "mlp488k": Subject(lambda: _built_in("mlp488k"), IMAGE, sgd),
    "mlp-adamw": Subject(lambda: _mlp(256, 1024, 1024, 10), (256,), adamw),
    "lenet": Subject(lambda: _built_in("lenet"), IMAGE, sgd),
    "cnn": Subject(_cnn, IMAGE, sgd),
    "resnet18": Subject(lambda: _built_in("resnet18"), (1, 32, 32), sgd, 2048),
    "gpt": Subject(lambda: _built_in("transformer"), (64,), adamw, 2400, tokens=256),
}
"""The GPT has 4 layers, 128 wide, and reads 64 tokens."""


class Tensors(Dataset[Any]):
    """In memory; a batch is one index_select."""

    def __init__(
        self, shape: tuple[int, ...], num_samples: int = NUM_SAMPLES, tokens: int = 0
    ) -> None:
        generator = torch.Generator().manual_seed(1)
        if tokens:
            self.inputs = torch.randint(0, tokens, (num_samples, *shape), generator=generator)
            self.targets = torch.randint(0, tokens, (num_samples, *shape), generator=generator)
        else:
            self.inputs = torch.rand(num_samples, *shape, generator=generator)
            self.targets = torch.randint(0, 10, (num_samples,), generator=generator)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        chosen = torch.tensor(indices)
        return self.inputs[chosen], self.targets[chosen]


def as_it_is(batch: Any) -> Any:
    return batch


def make_model(name: str) -> nn.Module:
    """Seed 0."""
    torch.manual_seed(0)
    return SUBJECTS[name].model()


class Part:
    """Positions of one rank in every batch, epoch after epoch: what Paceline hands to it, too."""

    def __init__(self, num_samples: int, batch_size: int, rank: int, world: int) -> None:
        self.num_samples, self.batch_size = num_samples, batch_size
        self.rank, self.world = rank, world

    def __iter__(self) -> Iterator[list[int]]:
        for start in range(0, self.num_samples, self.batch_size):
            first = start + self.batch_size * self.rank // self.world
            last = start + self.batch_size * (self.rank + 1) // self.world
            yield list(range(first, last))


def endless(loader: DataLoader[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def data_of(subject: Subject) -> Tensors:
    return Tensors(subject.shape, subject.num_samples, subject.tokens)


def drawn(data: Tensors, size: int) -> tuple[Tensor, Tensor]:
    """As many samples, drawn now: what a loop without a loader does."""
    return data.__getitems__(torch.randint(len(data), (size,)).tolist())


def draws_of(subject: Subject, size: int) -> Iterator[Any]:
    data = data_of(subject)
    while True:
        yield drawn(data, size)


def plain_steps(
    model: nn.Module, subject: Subject, batch: int, rank: int, world: int, *, draws: bool = False
) -> Step:
    """The bare loop: what everybody writes, over a loader or over batches that are drawn."""
    optimizer = subject.optimizer(model.parameters())
    part = Part(subject.num_samples, batch, rank, world)
    loader = DataLoader(data_of(subject), batch_sampler=part, collate_fn=as_it_is)
    batches = draws_of(subject, batch // world) if draws else endless(loader)

    def step() -> None:
        inputs, targets = next(batches)
        optimizer.zero_grad()
        subject.loss(model(inputs), targets).backward()
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
    model = make_model(options.model)
    step = plain_steps(model, SUBJECTS[options.model], options.batch, 0, 1)
    answer(channel, step, list(model.parameters()))


def hold(options: argparse.Namespace, rank: int) -> None:
    """Compute on a core of one's own, where the world has some."""
    if options.cores:
        os.sched_setaffinity(0, {int(options.cores.split(",")[rank])})


def be_bound(options: argparse.Namespace, channel: socket.socket) -> None:
    torch.set_num_threads(1)
    hold(options, options.rank)
    model = make_model(options.model)
    subject = SUBJECTS[options.model]
    step = plain_steps(model, subject, options.batch, options.rank, options.world)
    answer(channel, step, list(model.parameters()))


def be_reader(options: argparse.Namespace, channel: socket.socket) -> None:
    """A step: write my own memory, wait until all have, add another's to a sum (this is timed)."""
    torch.set_num_threads(1)
    size = sum(one.numel() for one in make_model(options.model).parameters())
    shared = torch.from_file(options.rendezvous, shared=True, size=options.world * (size + 16))
    rows = shared.view(options.world, size + 16)
    mine, others = rows[options.rank], rows[options.rank - 1]
    total, counts = torch.zeros(size), rows[:, size]
    file, count = channel.makefile("rw"), 0
    for line in file:
        order = json.loads(line)
        if order["steps"] == 0:
            torch.save([total], order["save"])
            file.write("{}\n")
            file.flush()
            return
        seconds = 0.0
        for _ in range(order["steps"]):
            mine[:size] = count
            count += 1
            mine[size] = count
            while float(counts.min()) < count:
                pass
            start = time.perf_counter()
            total += others[:size]
            seconds += time.perf_counter() - start
            mine[size + 1] = count  # nobody writes anew before all have read
            while float(rows[:, size + 1].min()) < count:
                pass
        file.write(json.dumps({"seconds": seconds}) + "\n")
        file.flush()


def be_ddp(options: argparse.Namespace, channel: socket.socket | None) -> None:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{options.rendezvous}", rank=options.rank,
        world_size=options.world,
    )  # fmt: skip
    subject = SUBJECTS[options.model]

    def build(cap: int, view: bool, static: bool) -> tuple[nn.Module, Step]:
        model = make_model(options.model)
        wrapped = DistributedDataParallel(
            model, bucket_cap_mb=cap, gradient_as_bucket_view=view, static_graph=static
        )
        return model, plain_steps(
            wrapped, subject, options.batch, options.rank, options.world, draws=bool(options.draws)
        )

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
    """Under ``paceline launch`` or plain ``python``: the loop of the README, or its loop without a
    loader, where a worker draws its part of a batch.
    """
    import paceline

    pace = paceline.connect()
    hold(options, pace.worker)
    if pace.num_workers == 1:
        torch.set_num_threads(options.world)
    model, subject = make_model(options.model), SUBJECTS[options.model]
    optimizer = subject.optimizer(model.parameters())
    data = data_of(subject)

    def step(inputs: Tensor, targets: Tensor) -> None:
        optimizer.zero_grad()
        subject.loss(model(inputs), targets).backward()
        optimizer.step()

    def over_a_loader() -> Iterator[None]:
        loader: Any = DataLoader(data, batch_size=options.batch, collate_fn=as_it_is)
        _, _, loader = pace.prepare(model, optimizer, loader)
        for _ in pace.epochs(1_000_000):
            for inputs, targets in loader:
                with pace.step():
                    step(inputs, targets)
                yield

    def over_numbers() -> Iterator[None]:
        pace.prepare(model, optimizer)
        for _ in pace.updates(1_000_000_000):
            with pace.step():
                step(*drawn(data, options.batch // options.world))
            yield

    steps = over_numbers() if options.draws else over_a_loader()
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

SIDE_BY_SIDE = ("ddp", "bound", "read")
"""Roles of several processes that are started one by one, each with its rank."""


class World:
    """One variant, started and waiting for steps."""

    def __init__(
        self, role: str, *, model: str, batch: int, total: int, world: int = 2, tune: int = 0,
        protocol: str = "full-sync", launched: bool = True, extra: tuple[str, ...] = (),
        draws: bool = False, cores: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        self.role = role
        self.usual_s: dict[str, float] = {}
        self._folder = tempfile.TemporaryDirectory()
        address = f"{self._folder.name}/socket"
        server = socket.socket(socket.AF_UNIX)
        server.bind(address)
        server.listen(world)
        own = [
            str(HERE), "--role", role, "--model", model, "--batch", str(batch), "--total",
            str(total), "--world", str(world), "--tune", str(tune), "--draws",
            str(int(draws)), "--cores", ",".join(map(str, cores)), "--answer-to", address,
            "--rendezvous", f"{self._folder.name}/rendezvous",
        ]  # fmt: skip
        python = [sys.executable]
        if role == "pace" and launched:
            launch = [
                "-m", "paceline", "launch", "--workers", str(world), "--protocol", protocol,
                "--run-dir", f"{self._folder.name}/run", *extra,
            ]  # fmt: skip
            commands = [[*python, *launch, *own]]
        elif role in SIDE_BY_SIDE:
            commands = [[*python, *own, "--rank", str(rank)] for rank in range(world)]
        else:
            commands = [[*python, *own]]
        is_one_thread = role in SIDE_BY_SIDE
        environment = {**os.environ, "OMP_NUM_THREADS": "1"} if is_one_thread else None
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, cores or before)  # the launcher's, too
        self._processes = [
            subprocess.Popen(one, stdout=subprocess.DEVNULL, env=environment) for one in commands
        ]
        os.sched_setaffinity(0, before)
        server.settimeout(600)
        told = world if role in SIDE_BY_SIDE and role != "ddp" else 1
        self._channels = [server.accept()[0] for _ in range(told)]
        self._files = [one.makefile("rw") for one in self._channels]
        self.best = json.loads(self._files[0].readline())["best"] if role == "ddp" else None

    def steps(self, count: int) -> float:
        """Make ``count`` steps; the seconds that they took, of the slowest who was asked."""
        self._ask({"steps": count})
        return max(float(json.loads(file.readline())["seconds"]) for file in self._files)

    def end(self) -> list[Tensor]:
        """The parameters at the end; all processes are gone.

        From then on `usual_s` says where a usual step of Paceline's goes: medians over all pushes,
        since one step a block also waited for the block to begin.
        """
        path = f"{self._folder.name}/parameters.pt"
        self._ask({"steps": 0, "save": path})
        for file in self._files:
            file.readline()
        tensors: list[Tensor] = torch.load(path)
        for process in self._processes:
            process.wait(60)
        trace = Path(self._folder.name) / "run" / FILE_NAME
        pushes = (
            [one for one in read_trace(trace) if isinstance(one, Handed)] if trace.exists() else []
        )
        if pushes:
            self.usual_s = {
                "computing": statistics.median(one.compute_s for one in pushes),
                "waiting": statistics.median(one.wait_s for one in pushes),
                "exchange": statistics.median(one.push_s for one in pushes),
            }
        self._folder.cleanup()
        return tensors

    def _ask(self, order: dict[str, Any]) -> None:
        for file in self._files:
            file.write(json.dumps(order) + "\n")
            file.flush()


ALONE = {"one": be_one, "bound": be_bound, "read": be_reader}
"""Roles whose processes are all asked."""


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, kind in {
        "role": str, "model": str, "batch": int, "total": int, "world": int, "rank": int,
        "tune": int, "draws": int, "cores": str, "answer-to": str, "rendezvous": str,
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=kind)
    options = parser.parse_args()
    if options.role == "pace":
        be_pace(options)
    elif options.role in ALONE:
        ALONE[options.role](options, _connect(options.answer_to))
    else:
        be_ddp(options, _connect(options.answer_to) if options.rank == 0 else None)


if __name__ == "__main__":
    main()
