"""Large networks on a GPU against a hand-tuned loop and Lightning; called by gpu.py.

    ResNet-18 (the book's, without a first pooling) and ResNet-50 at 224 x 224, GPT-2's 124 M body

Each trains on the same batches in every way: eager fp32 and bf16 and ``--fast auto --precision
auto`` under Paceline; the same two by hand and, tuned by hand, bf16 with channels last,
torch.compile and the fused optimizer; Lightning in bf16 where it is installed. Blocks of steps in
turn. Model FLOP utilisation is relative to the measured speed of a matrix product. On a CPU
(--device cpu) small networks test the check itself.
"""

import importlib.util
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

import table
from paceline.context import Context
from paceline.data.arrays import ArrayDataset, collate_batch
from paceline.exchange.solo import SoloExchange
from paceline.script.worker import Pace
from paceline.workloads import resnets, transformer

Row = list[str]
Step = Callable[[], Tensor]
WANTED_TUNED, WANTED_LIGHTNING = 0.98, 1.0
BLOCKS, STEPS = 7, 10
LATEST_S = 420.0
"""Seconds into a run of gpu.py after which no further network begins."""
_start_s = time.perf_counter()


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A network and its data; speed is in ``unit`` a second."""

    name: str
    make: Callable[[], nn.Module]
    data: ArrayDataset
    batch: int
    unit: str
    units_a_sample: int
    has_planes: bool

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        inputs, targets = batch
        return nn.functional.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())

    def loader(self) -> "DataLoader[Any]":
        return DataLoader(
            self.data, batch_size=self.batch, collate_fn=collate_batch, drop_last=True
        )

    def parts(self, device: str, *, is_fused: bool = False) -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = self.make().to(device)
        fused = {"fused": True} if is_fused else {}
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4, **fused)  # type: ignore[arg-type]  # fused is a flag


def networks(is_small: bool) -> list[Network]:
    side_px, window, sample = (32, 16, 8) if is_small else (224, 1024, 256)
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 256, (sample, 3, side_px, side_px), dtype=torch.uint8,
                           generator=generator)  # fmt: skip
    images = ArrayDataset(pixels, torch.randint(0, 10, (sample,), generator=generator))
    num_tokens = 128 if is_small else 50_304
    texts = torch.randint(0, num_tokens, (2, sample // 2, window), generator=generator)
    shape = {"width": 64, "num_heads": 2, "depth": 2} if is_small else {
        "width": 768, "num_heads": 12, "depth": 12}  # fmt: skip
    return [
        Network(name="ResNet-18", make=lambda: resnets.build_resnet18("default", 10, 3),
                data=images, batch=4 if is_small else 64, unit="images", units_a_sample=1,
                has_planes=True),
        Network(name="ResNet-50", make=lambda: resnets.build_resnet50(10, 3), data=images,
                batch=4 if is_small else 128, unit="images", units_a_sample=1, has_planes=True),
        Network(name="transformer, 124 M",
                make=lambda: transformer.Transformer(num_tokens=num_tokens, window=window, **shape),
                data=ArrayDataset(texts[0], texts[1]), batch=2 if is_small else 8, unit="tokens",
                units_a_sample=window, has_planes=False),
    ]  # fmt: skip


def hand_written_step(
    network: Network, device: str, *, is_half: bool, is_tuned: bool = False
) -> Step:
    """Return a step of an expert's loop."""
    model, optimizer = network.parts(device, is_fused=is_tuned)
    if is_tuned and network.has_planes:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # its stub lacks it
    call: Any = torch.compile(model) if is_tuned else model

    def loop() -> Iterator[Tensor]:
        while True:
            for batch in network.loader():
                device_batch = [tensor.to(device, non_blocking=True) for tensor in batch]
                optimizer.zero_grad()
                with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=is_half):
                    loss = network.loss(call, device_batch)
                loss.backward()
                optimizer.step()
                yield loss.detach()

    return loop().__next__


def paceline_step(network: Network, context: Context, fast: str = "none") -> tuple[Step, Any]:
    """Return a step of the loop with the four lines, and the notes of its trial."""
    pace = Pace(SoloExchange(), context)
    model, optimizer, loader = pace.prepare(
        *network.parts(str(pace.device)), network.loader(), fast=fast, forward=network.loss
    )

    def loop() -> Iterator[Tensor]:
        for _ in pace.epochs(1_000_000):
            for batch in loader:
                with pace.step():
                    optimizer.zero_grad()
                    with (
                        pace.autocast()
                        if context.precision
                        else torch.autocast("cpu", enabled=False)
                    ):
                        loss = network.loss(model, batch)
                    pace.backward(loss)
                    optimizer.step()
                yield loss.detach()

    assert pace._prepared is not None
    return loop().__next__, pace._prepared.settled.notes


def lightning_times_s(network: Network, device: str, num_steps: int) -> list[float]:
    """Time blocks of steps in bf16, without the first; Lightning cannot take turns."""
    import lightning

    times_s: list[float] = []

    class Lit(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.optimizer = network.parts(device)

        def training_step(self, batch: Any, number: int) -> Tensor:
            return network.loss(self.model, batch)

        def configure_optimizers(self) -> Any:
            return self.optimizer

    class Clock(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step % num_steps:
                return
            if device.startswith("cuda"):
                torch.cuda.synchronize()
            times_s.append(time.perf_counter())

    kind = "gpu" if device.startswith("cuda") else "cpu"
    lightning.Trainer(
        accelerator=kind, devices=1, precision="bf16-mixed", max_steps=4 * num_steps, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[Clock()], max_epochs=-1,
    ).fit(Lit(), network.loader())  # fmt: skip
    return [(b - a) / num_steps for a, b in itertools.pairwise(times_s)]


def block_s(step: Step, num_steps: int) -> float:
    start_s = time.perf_counter()
    for _ in range(num_steps):
        last = step()
    float(last)  # waits for the device
    return (time.perf_counter() - start_s) / num_steps


def flops_a_step(network: Network, device: str) -> int:
    """Return the FLOPs of one forward and backward pass, as torch counts them."""
    model, _ = network.parts(device)
    batch = [tensor.to(device) for tensor in next(iter(network.loader()))]
    with FlopCounterMode(display=False) as counter:
        network.loss(model, batch).backward()
    return int(counter.get_total_flops())


def ceiling_flops(device: str) -> float:
    """Return FLOP/s of a large matrix product in bf16 (on a CPU in fp32)."""
    is_cpu = device == "cpu"
    size, dtype = (512, torch.float32) if is_cpu else (8192, torch.bfloat16)
    a = torch.randn(size, size, device=device, dtype=dtype)

    def product() -> Tensor:
        return (a @ a)[0, 0]

    block_s(product, 5)
    return 2 * size**3 / min(block_s(product, 20) for _ in range(5))


def large_networks(device: str) -> list[Row]:
    """Measure images or tokens a second, and the model FLOP utilisation, of every way."""
    is_small = device == "cpu"
    ceiling = ceiling_flops(device)
    rows = [["matrix product, the ceiling", f"{ceiling / 1e12:.1f} TFLOP/s", "", ""]]
    for network in networks(is_small):
        if time.perf_counter() - _start_s > LATEST_S:
            rows.append([network.name, "not run: no time was left", "", "no"])
            continue
        rows += rows_of(network, device, ceiling, is_small=is_small)
        if not is_small:
            torch.cuda.empty_cache()
    return rows


def rows_of(network: Network, device: str, ceiling: float, *, is_small: bool) -> list[Row]:
    flops = flops_a_step(network, device)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        auto, notes = paceline_step(network, Context(device=device, precision="auto"), "auto")
    steps: dict[str, Step] = {
        "by hand, fp32": hand_written_step(network, device, is_half=False),
        "by hand, bf16": hand_written_step(network, device, is_half=True),
        "tuned by hand": hand_written_step(network, device, is_half=True, is_tuned=True),
        "fp32": paceline_step(network, Context(device=device))[0],
        "bf16": paceline_step(network, Context(device=device, precision="bf16"))[0],
        "--fast auto --precision auto": auto,
    }
    num_blocks, num_steps = (2, 1) if is_small else (BLOCKS, STEPS)
    for step in steps.values():
        block_s(step, 3)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(num_blocks):
        order = list(steps)
        for name in (*order[number % 6 :], *order[: number % 6]):
            times[name].append(block_s(steps[name], num_steps))
    if importlib.util.find_spec("lightning") is not None:
        times["Lightning, bf16"] = lightning_times_s(network, device, num_steps)
    rows = [_row(network, name, own_s, times, flops, ceiling) for name, own_s in times.items()]
    return [*rows, *([f"{network.name}: found", note, "", ""] for note in notes[:1])]


def _row(
    network: Network, name: str, own_s: list[float], times: dict[str, list[float]], flops: int,
    ceiling: float,
) -> Row:  # fmt: skip
    median_s, _, _ = table.interval(own_s)
    per_s = network.batch * network.units_a_sample / median_s
    baselines = {"fp32": "by hand, fp32", "bf16": "by hand, bf16",
                 "--fast auto --precision auto": "tuned by hand"}  # fmt: skip
    comparison, wanted, is_reached = "", "", ""
    if name in baselines:
        pairs = zip(times[baselines[name]], own_s, strict=True)
        ratio, low, high = table.interval([baseline_s / step_s for baseline_s, step_s in pairs])
        comparison, wanted = (
            f"; {ratio:.3f} ({low:.3f} to {high:.3f}) of {baselines[name]}",
            ">= 0.98",
        )
        is_reached = "yes" if ratio >= WANTED_TUNED else "no"
        if name == "bf16" and "Lightning, bf16" in times:
            lead = table.interval(times["Lightning, bf16"])[0] / median_s
            comparison, wanted = f"{comparison}, {lead:.3f} of Lightning", ">= 0.98, >= 1.0"
            is_reached = "yes" if ratio >= WANTED_TUNED and lead >= WANTED_LIGHTNING else "no"
    speed = f"{per_s:,.0f} {network.unit}/s, {flops / median_s / ceiling:.0%} of the ceiling"
    return [f"{network.name}, {name}", f"{speed}{comparison}", wanted, is_reached]


NETWORKS: tuple[Callable[[str], "Row | list[Row]"], ...] = (large_networks,)
