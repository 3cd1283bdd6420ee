"""Images a second of Paceline, Lightning, Accelerate and a loop by hand: two workers, one run.

    python bench/peers.py [--rounds 8] [--steps 20] [--write]        (pip install -e '.[peers]')

LeNet, global batch 256, SGD, fp32, the same data set, two processes with one thread each. All are
alive at once and take blocks of steps in turn while the others wait. Each is started as its own
documentation says; the first process of each holds its loop between two steps until its turn. The
processes that trained are counted and must be two.

Every peer appears twice: as documented, against ``--fast none``, and tuned, against
``--fast auto``. Tuned means the fastest, in a separate trial before, of all eight combinations of
the settings that `--fast auto` tries for itself (memory that is kept, channels last, compile), and
then of all four of DDP's own (buckets as views, a static graph). The bucket size does not matter:
all gradients of LeNet fit in one. Paceline appears twice in each half, which shows how far equal
figures differ on this machine. Writes results/peers.md.
"""

import argparse
import contextlib
import json
import math
import os
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from table import machine, spread, write_table
from worlds import Tensors, identity, make_model

HERE = Path(__file__).resolve()
BATCH, WORLD, LEARNING_RATE = 256, 2, 0.01
loss_of = nn.functional.cross_entropy


@dataclass(frozen=True, slots=True)
class Tuning:
    """Settings that a peer's user can choose; the last two are DDP's own."""

    memory: bool = False
    channels_last: bool = False
    compile: bool = False
    view: bool = False
    static: bool = False

    def __str__(self) -> str:
        return " ".join(f.name for f in fields(self) if getattr(self, f.name)) or "none"

    @classmethod
    def parse(cls, text: str) -> "Tuning":
        return cls(**{name: True for name in text.split() if name != "none"})

    def model(self) -> nn.Module:
        model = make_model("lenet")
        if self.channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # its stub lacks it
        return torch.compile(model) if self.compile else model  # type: ignore[return-value]  # a compiled model is a module, too

    def inputs(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the inputs in the model's memory format."""
        if self.channels_last:
            return inputs.to(memory_format=torch.channels_last)
        return inputs

    def ddp(self) -> dict[str, Any]:
        return {"gradient_as_bucket_view": self.view, "static_graph": self.static}

    def environment(self) -> dict[str, str]:
        """Make glibc keep freed memory, as ``--fast memory`` does."""
        keep = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
        return keep if self.memory else {}


class Turn:
    """Holds the loop of the first process before each step until the bench requests it."""

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
        """Wait before each step, and once after the last one."""
        if self._file is None:
            return
        if self._left == 0:
            if self._start_s:
                self._file.write(json.dumps(time.perf_counter() - self._start_s) + "\n")
                self._file.flush()
            line = self._file.readline()
            if not line:
                os._exit(1)  # the bench is gone, and the loop would never end
            self._left = int(line)
            self._start_s = time.perf_counter()
        self._left -= 1


def data(batch_size: int = BATCH // WORLD, **options: Any) -> DataLoader[Any]:
    return DataLoader(
        Tensors((1, 28, 28)), batch_size=batch_size, collate_fn=identity, drop_last=True, **options
    )


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)


def train_by_hand(turn: Turn, total: int, tuning: Tuning) -> None:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    model = DistributedDataParallel(tuning.model(), **tuning.ddp())
    optimizer = sgd(model)
    loader = data(sampler=DistributedSampler(Tensors((1, 28, 28)), shuffle=True))
    num_done = 0
    while num_done < total:
        for inputs, targets in loader:
            turn.wait()
            optimizer.zero_grad()
            loss_of(model(tuning.inputs(inputs)), targets).backward()
            optimizer.step()
            num_done += 1
            if num_done == total:
                break
    turn.wait()
    dist.destroy_process_group()


def train_with_accelerate(turn: Turn, total: int, tuning: Tuning) -> None:
    from accelerate import Accelerator, DistributedDataParallelKwargs

    kwargs = DistributedDataParallelKwargs(**tuning.ddp())
    accelerator = Accelerator(cpu=True, kwargs_handlers=[kwargs])
    model = tuning.model()
    model, optimizer, loader = accelerator.prepare(model, sgd(model), data(shuffle=True))
    num_done = 0
    while num_done < total:
        for inputs, targets in loader:
            turn.wait()
            optimizer.zero_grad()
            accelerator.backward(loss_of(model(tuning.inputs(inputs)), targets))
            optimizer.step()
            num_done += 1
            if num_done == total:
                break
    turn.wait()


def train_with_lightning(turn: Turn, total: int, tuning: Tuning) -> None:
    import lightning
    from lightning.pytorch.strategies import DDPStrategy

    class Lit(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = tuning.model()

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            inputs, targets = batch
            return loss_of(self.model(tuning.inputs(inputs)), targets)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self.model)

    class WaitForTurn(lightning.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            turn.wait()

    trainer = lightning.Trainer(
        accelerator="cpu", devices=WORLD, strategy=DDPStrategy(**tuning.ddp()), max_steps=total,
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[WaitForTurn()],
    )  # fmt: skip
    trainer.fit(Lit(), data(shuffle=True))
    turn.wait()


def train_with_paceline(turn: Turn, total: int, tuning: Tuning) -> None:
    import paceline

    pace = paceline.connect()
    model = make_model("lenet")
    model, optimizer, loader = pace.prepare(model, sgd(model), data(BATCH, shuffle=True))
    num_done = 0
    for _ in pace.epochs(1_000_000):
        for inputs, targets in loader:
            turn.wait()
            with pace.step():
                optimizer.zero_grad()
                loss_of(model(inputs), targets).backward()
                optimizer.step()
            num_done += 1
            if num_done == total:
                turn.wait()
                pace.stop()


LOOPS = {
    "hand-written DDP": train_by_hand, "Accelerate": train_with_accelerate,
    "Lightning": train_with_lightning, "Paceline": train_with_paceline,
}  # fmt: skip
PEERS = [name for name in LOOPS if name != "Paceline"]


def command_for(loop: str, fast: str, folder: str) -> list[str]:
    """Return the start command. On CPUs Accelerate's launcher needs MPI; its docs name torchrun."""
    python = sys.executable
    if loop == "Paceline":
        flags = ["--workers", str(WORLD), "--fast", fast, "--run-dir", f"{folder}/run"]
        return [python, "-m", "paceline", "launch", *flags, str(HERE)]
    if loop == "Lightning":
        return [python, str(HERE)]
    return [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORLD),
            str(HERE)]  # fmt: skip


class DidNotStart(Exception):
    """A contender did not start, or ended early; the message is its output."""


class Contender:
    """A loop that has started and waits for its turn.

    Args:
        total: steps that will be requested.
        fast: Paceline's ``--fast``.

    Raises:
        DidNotStart: no process reached its first step.
    """

    def __init__(self, loop: str, total: int, tuning: Tuning, fast: str = "none") -> None:
        self._folder = tempfile.TemporaryDirectory()
        folder = self._folder.name
        server = socket.socket(socket.AF_UNIX)
        server.bind(f"{folder}/socket")
        server.listen(1)
        server.settimeout(240)
        arguments = [
            "--loop",
            loop,
            "--tuning",
            str(tuning),
            "--folder",
            folder,
            "--total",
            str(total),
        ]
        environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore",
            **tuning.environment(),
        }  # fmt: skip
        self._log = open(f"{folder}/log", "w")  # noqa: SIM115  it lives as long as the process
        self._process = subprocess.Popen(
            [*command_for(loop, fast, folder), *arguments], env=environment, stdout=self._log,
            stderr=self._log, start_new_session=True,
        )  # fmt: skip
        try:
            self._channel, _ = server.accept()
        except TimeoutError:
            text = Path(folder, "log").read_text()
            self.end()
            raise DidNotStart(f"{loop}, {tuning}:\n{text}") from None
        self._file = self._channel.makefile("rw")

    def block_s(self, num_steps: int) -> float:
        answer = ""
        with contextlib.suppress(ConnectionError):  # it has ended, and its log says why
            self._file.write(f"{num_steps}\n")
            self._file.flush()
            answer = self._file.readline()
        if not answer:
            raise DidNotStart(Path(self._folder.name, "log").read_text())
        return float(json.loads(answer)) / num_steps

    @property
    def num_processes(self) -> int:
        return len(list(Path(self._folder.name).glob("pid-*")))

    def findings(self) -> list[str]:
        """Return what Paceline's trial found, from the plan it prints."""
        text = Path(self._folder.name, "log").read_text()
        return [line for line in text.splitlines() if "fast:" in line]

    def end(self) -> None:
        with contextlib.suppress(AttributeError, OSError):  # it never connected, or has ended
            self._file.close()
            self._channel.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, 9)
        self._folder.cleanup()


def tune(loop: str, steps: int) -> Tuning:
    """Find the fastest of all settings of this loop, by a trial of each."""
    best, best_s = Tuning(), math.inf
    grid = [Tuning(*choice) for choice in product((False, True), repeat=3)]
    for stage in range(2):
        if stage:
            grid = [
                replace(best, view=view, static=static)
                for view, static in product((False, True), repeat=2)
            ]  # fmt: skip
        for tuning in grid:
            try:
                contender = Contender(loop, 4 * steps, tuning)
                contender.block_s(2 * steps)
                seconds = min(contender.block_s(steps) for _ in range(2))
            except DidNotStart as error:
                print(f"{loop}, {tuning}: does not run\n{error}", file=sys.stderr)
                continue
            contender.end()
            print(f"trial | {loop} | {tuning} | {1000 * seconds:.2f}", flush=True)
            if seconds < best_s:
                best, best_s = tuning, seconds
    return best


@dataclass(slots=True)
class Row:
    """A loop in one half of the table, and its times."""

    half: str
    loop: str
    tuning: Tuning
    fast: str
    times_s: list[float] = field(default_factory=list)
    num_processes: int = 0
    findings: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        if self.loop == "Paceline":
            return f"Paceline, --fast {self.fast}"
        return f"{self.loop}, {self.half}"


def rows_of(steps: int) -> list[Row]:
    """Return a row for every loop, and two for Paceline in each half."""
    rows = []
    for half, fast in (("as written", "none"), ("tuned", "auto")):
        for loop in PEERS:
            tuning = Tuning(view=loop == "hand-written DDP")
            rows.append(Row(half, loop, tune(loop, steps) if half == "tuned" else tuning, ""))
        rows += [Row(half, "Paceline", Tuning(), fast) for _ in range(2)]
    return rows


def measure(rows: list[Row], rounds: int, steps: int) -> None:
    # The warm-up block and the first round's compiling steps do not count.
    total = steps * (rounds + 1)
    contenders = [Contender(row.loop, total, row.tuning, row.fast) for row in rows]
    pairs = list(zip(rows, contenders, strict=True))
    for number in range(rounds + 1):
        first = number % len(pairs)
        for row, contender in (*pairs[first:], *pairs[:first]):
            seconds = contender.block_s(steps)
            if number:
                row.times_s.append(seconds)
    for row, contender in pairs:
        row.num_processes, row.findings = contender.num_processes, contender.findings()
        assert row.num_processes == WORLD, f"{row.name}: {row.num_processes} processes"
        contender.end()


def format_table(rows: list[Row]) -> list[list[str]]:
    """Compare each row with the peers of its own half."""
    cells = []
    for row in rows:
        ratios = [
            spread([peer_s / s for peer_s, s in zip(peer.times_s, row.times_s, strict=True)])
            for peer in rows if peer.half == row.half and peer.loop in PEERS
        ]  # fmt: skip
        rates = [BATCH / seconds for seconds in row.times_s]
        setting = "its own trial" if row.fast == "auto" else str(row.tuning)
        cells.append([
            row.name, setting, str(row.num_processes),
            spread([1000 * seconds for seconds in row.times_s]), spread(rates, 0), *ratios,
        ])  # fmt: skip
    return cells


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--write", action="store_true")
    for name in ("--loop", "--folder", "--tuning"):
        parser.add_argument(name, default="", help=argparse.SUPPRESS)
    parser.add_argument("--total", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.loop:
        torch.set_num_threads(1)
        turn = Turn(options.folder, rank_of(options.loop))
        LOOPS[options.loop](turn, options.total, Tuning.parse(options.tuning))
        return
    note = machine()
    rows = rows_of(options.steps)
    measure(rows, options.rounds, options.steps)
    cells = format_table(rows)
    for row_cells in cells:
        print(" | ".join(row_cells), flush=True)
    versions = ", ".join(f"{name} {_version(name)}" for name in ("lightning", "accelerate"))
    header = ["loop", "set", "processes", "ms a step", "images/s", *(f": {peer}" for peer in PEERS)]
    if options.write:
        findings = dict.fromkeys(
            f"    {line.strip()}" for row in rows for line in row.findings
            if " in /" not in line and " from /" not in line
        )  # fmt: skip
        lines = "\n".join(["What `--fast auto` found:", "", *findings, ""]) if findings else ""
        write_table("peers", "Two workers beside the peers, LeNet 256", header, cells,
                    f"{lines}\n{options.rounds} interleaved blocks of {options.steps} steps; "
                    "median (least to most); last columns: images/s over those of the peers of the "
                    f"same half, as written or tuned; {versions}. {note}")  # fmt: skip


def rank_of(loop: str) -> int:
    """Return the rank; Paceline sets no RANK where a script makes torch process groups."""
    if loop == "Paceline":
        import paceline

        return paceline.connect().worker
    return int(os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or 0)


def _version(name: str) -> str:
    from importlib.metadata import version

    return version(name)


if __name__ == "__main__":
    main()
