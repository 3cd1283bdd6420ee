"""Variants of the same training, alive at once, run in turn block by block.

A world is one or more processes that train the same model on the same batches. Its main process
reads a number of steps from a socket, runs them, and answers with the seconds; the others follow
because they wait for it. So variants are interleaved (A B A B) on a noisy machine.

Roles:  `ddp`  `pace`  `one` (one process, all threads)
        `bound` (each process its part of every batch, without exchange)
        `read` (each process reads what another has just written, as much as a gradient)
A world can be pinned to cores: its process of rank r computes on the r-th of them.
`ddp` and `pace` can run without a loader, too: each process then draws its part of every batch.
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
from collections.abc import Callable, Iterator, Sequence
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
_ROUNDS = 4
"""Turns of each of DDP's settings before the best is chosen."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A model and its data.

    Attributes:
        model: builds the model, with torch's own initialisation.
        shape: of one input.
        tokens: 0 if inputs are numbers; else inputs and targets are tokens below this number.
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
    """Return a small network with batch norm, for inputs of 1 x 28 x 28."""
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
"""The GPT has 4 layers, is 128 wide, and reads 64 tokens."""


class Tensors(Dataset[Any]):
    """A data set in memory; a batch is one index_select."""

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
        selected = torch.tensor(indices)
        return self.inputs[selected], self.targets[selected]


def identity(batch: Any) -> Any:
    return batch


def make_model(name: str) -> nn.Module:
    """Build a model with seed 0."""
    torch.manual_seed(0)
    return SUBJECTS[name].model()


class Part:
    """Positions of one rank in every batch, epoch after epoch, as Paceline assigns them."""

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


def draw_batch(tensors: Tensors, size: int) -> tuple[Tensor, Tensor]:
    """Draw ``size`` samples, as a loop without a loader does."""
    return tensors.__getitems__(torch.randint(len(tensors), (size,)).tolist())


def draw_batches(subject: Subject, size: int) -> Iterator[Any]:
    data = data_of(subject)
    while True:
        yield draw_batch(data, size)


def plain_steps(
    model: nn.Module, subject: Subject, batch: int, rank: int, world: int, *, draws: bool = False
) -> Step:
    """Return a step of the bare loop, over a loader or over drawn batches."""
    optimizer = subject.optimizer(model.parameters())
    part = Part(subject.num_samples, batch, rank, world)
    loader = DataLoader(data_of(subject), batch_sampler=part, collate_fn=identity)
    batches = draw_batches(subject, batch // world) if draws else endless(loader)

    def step() -> None:
        inputs, targets = next(batches)
        optimizer.zero_grad()
        subject.loss(model(inputs), targets).backward()
        optimizer.step()

    return step


# -- the roles ---------------------------------------------------------------------------------


def serve(channel: socket.socket, step: Step, parameters: list[Tensor]) -> None:
    """Run as many steps as requested, until a request to end; then save the parameters."""
    file = channel.makefile("rw")
    for line in file:
        request = json.loads(line)
        if request["steps"] == 0:
            torch.save([parameter.detach().clone() for parameter in parameters], request["save"])
            file.write("{}\n")
            file.flush()
            return
        start = time.perf_counter()
        for _ in range(request["steps"]):
            step()
        file.write(json.dumps({"seconds": time.perf_counter() - start}) + "\n")
        file.flush()


def run_one(options: argparse.Namespace, channel: socket.socket) -> None:
    torch.set_num_threads(options.world)
    model = make_model(options.model)
    step = plain_steps(model, SUBJECTS[options.model], options.batch, 0, 1)
    serve(channel, step, list(model.parameters()))


def pin_to_core(options: argparse.Namespace, rank: int) -> None:
    """Pin this process to its core, if the world has cores."""
    if options.cores:
        os.sched_setaffinity(0, {int(options.cores.split(",")[rank])})


def run_bound(options: argparse.Namespace, channel: socket.socket) -> None:
    torch.set_num_threads(1)
    pin_to_core(options, options.rank)
    model = make_model(options.model)
    subject = SUBJECTS[options.model]
    step = plain_steps(model, subject, options.batch, options.rank, options.world)
    serve(channel, step, list(model.parameters()))


def run_reader(options: argparse.Namespace, channel: socket.socket) -> None:
    """Step: write own memory, wait for all to do so, add another's to a sum (this is timed)."""
    torch.set_num_threads(1)
    size = sum(parameter.numel() for parameter in make_model(options.model).parameters())
    shared = torch.from_file(options.rendezvous, shared=True, size=options.world * (size + 16))
    rows = shared.view(options.world, size + 16)
    own, neighbour = rows[options.rank], rows[options.rank - 1]
    total, counts = torch.zeros(size), rows[:, size]
    file, count = channel.makefile("rw"), 0
    for line in file:
        request = json.loads(line)
        if request["steps"] == 0:
            torch.save([total], request["save"])
            file.write("{}\n")
            file.flush()
            return
        seconds = 0.0
        for _ in range(request["steps"]):
            own[:size] = count
            count += 1
            own[size] = count
            while float(counts.min()) < count:
                pass
            start = time.perf_counter()
            total += neighbour[:size]
            seconds += time.perf_counter() - start
            own[size + 1] = count  # no one writes again before all have read
            while float(rows[:, size + 1].min()) < count:
                pass
        file.write(json.dumps({"seconds": seconds}) + "\n")
        file.flush()


def run_ddp(options: argparse.Namespace, channel: socket.socket | None) -> None:
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

    best = (25, True, False)
    if options.tune:
        grid = [(c, v, s) for c in (1, 25, 100) for v in (False, True) for s in (False, True)]
        medians_s = torch.tensor(_timed_in_turns([build(*each)[1] for each in grid], options.tune))
        dist.all_reduce(medians_s, dist.ReduceOp.MAX)
        best = grid[int(medians_s.argmin())]
    model, step = build(*best)
    if channel is None:
        for _ in range(options.total):
            step()
    else:
        channel.sendall((json.dumps({"best": best}) + "\n").encode())
        serve(channel, step, list(model.parameters()))
    dist.barrier()


def _timed_in_turns(steps: Sequence[Step], count: int) -> list[float]:
    """Return the median seconds of ``count`` steps of each, over rounds in which all take turns."""
    rounds_s: list[list[float]] = [[] for _ in steps]
    for number in range(_ROUNDS + 1):
        for step, taken_s in zip(steps, rounds_s, strict=True):
            start = time.perf_counter()
            for _ in range(count):
                step()
            if number:  # the first warms up
                taken_s.append(time.perf_counter() - start)
    return [statistics.median(taken_s) for taken_s in rounds_s]


def run_pace(options: argparse.Namespace) -> None:
    """Run, under ``paceline launch`` or plain ``python``, the README's loop, or its loop without
    a loader, where a worker draws its part of a batch.
    """
    import paceline

    pace = paceline.connect()
    pin_to_core(options, pace.worker)
    if pace.num_workers == 1:
        torch.set_num_threads(options.world)
    model, subject = make_model(options.model), SUBJECTS[options.model]
    optimizer = subject.optimizer(model.parameters())
    data = data_of(subject)

    def step(inputs: Tensor, targets: Tensor) -> None:
        optimizer.zero_grad()
        subject.loss(model(inputs), targets).backward()
        optimizer.step()

    def loader_steps() -> Iterator[None]:
        loader: Any = DataLoader(data, batch_size=options.batch, collate_fn=identity)
        _, _, loader = pace.prepare(model, optimizer, loader)
        for _ in pace.epochs(1_000_000):
            for inputs, targets in loader:
                with pace.step():
                    step(inputs, targets)
                yield

    def number_steps() -> Iterator[None]:
        pace.prepare(model, optimizer)
        for _ in pace.updates(1_000_000_000):
            with pace.step():
                step(*draw_batch(data, options.batch // options.world))
            yield

    steps = number_steps() if options.draws else loader_steps()
    if pace.is_main:
        channel = _connect(options.answer_to)
        serve(channel, lambda: next(steps), list(model.parameters()))
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

KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
"""Makes glibc keep freed memory, as Paceline's workers do."""
SIDE_BY_SIDE = ("ddp", "bound", "read")
"""Roles whose processes are started one by one, each with its rank."""


class World:
    """One variant, started and waiting for requests."""

    def __init__(
        self, role: str, *, model: str, batch: int, total: int, world: int = 2, tune: int = 0,
        protocol: str = "full-sync", launched: bool = True, extra: tuple[str, ...] = (),
        draws: bool = False, cores: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        self.role = role
        self.median_s: dict[str, float] = {}
        self._folder = tempfile.TemporaryDirectory()
        address = f"{self._folder.name}/socket"
        server = socket.socket(socket.AF_UNIX)
        server.bind(address)
        server.listen(world)
        arguments = [
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
            commands = [[*python, *launch, *arguments]]
        elif role in SIDE_BY_SIDE:
            commands = [[*python, *arguments, "--rank", str(rank)] for rank in range(world)]
        else:
            commands = [[*python, *arguments]]
        environment = dict(os.environ)
        if role in SIDE_BY_SIDE:
            environment["OMP_NUM_THREADS"] = "1"
        if role in SIDE_BY_SIDE:
            environment |= KEEP_MEMORY
        affinity = os.sched_getaffinity(0)
        os.sched_setaffinity(0, cores or affinity)  # for the launcher, too
        self._processes = [
            subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
            for command in commands
        ]
        os.sched_setaffinity(0, affinity)
        server.settimeout(600)
        num_channels = world if role in SIDE_BY_SIDE and role != "ddp" else 1
        self._channels = [server.accept()[0] for _ in range(num_channels)]
        self._files = [channel.makefile("rw") for channel in self._channels]
        self.best = json.loads(self._files[0].readline())["best"] if role == "ddp" else None

    def steps(self, count: int) -> float:
        """Run ``count`` steps; return the seconds of the slowest process."""
        self._send({"steps": count})
        return max(float(json.loads(file.readline())["seconds"]) for file in self._files)

    def end(self) -> list[Tensor]:
        """End all processes and return the final parameters.

        Then `median_s` has the parts of a typical step of Paceline: medians over all pushes, since
        the first step of a block also waited for the block to begin.
        """
        path = f"{self._folder.name}/parameters.pt"
        self._send({"steps": 0, "save": path})
        for file in self._files:
            file.readline()
        tensors: list[Tensor] = torch.load(path)
        for process in self._processes:
            process.wait(60)
        trace = Path(self._folder.name) / "run" / FILE_NAME
        pushes = (
            [record for record in read_trace(trace) if isinstance(record, Handed)]
            if trace.exists()
            else []
        )
        if pushes:
            self.median_s = {
                "computing": statistics.median(record.compute_s for record in pushes),
                "waiting": statistics.median(record.wait_s for record in pushes),
                "exchange": statistics.median(record.push_s for record in pushes),
            }
        self._folder.cleanup()
        return tensors

    def _send(self, request: dict[str, Any]) -> None:
        for file in self._files:
            file.write(json.dumps(request) + "\n")
            file.flush()


NO_PEER_ROLES = {"one": run_one, "bound": run_bound, "read": run_reader}
"""Roles in which every process answers requests."""


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, value_type in {
        "role": str, "model": str, "batch": int, "total": int, "world": int, "rank": int,
        "tune": int, "draws": int, "cores": str, "answer-to": str, "rendezvous": str,
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=value_type)
    options = parser.parse_args()
    if options.role == "pace":
        run_pace(options)
    elif options.role in NO_PEER_ROLES:
        NO_PEER_ROLES[options.role](options, _connect(options.answer_to))
    else:
        run_ddp(options, _connect(options.answer_to) if options.rank == 0 else None)


if __name__ == "__main__":
    main()
