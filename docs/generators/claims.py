"""docs/claims.md: what five documents claim, beside what results/ has of it, and a verdict.

Figures and verdicts are computed from the pages of results/, so they change with them. A passage is
given in few words of our own; what needs a GPU is listed without a figure. Above 300 lines, since
all claims are one list.
"""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from .parts import RESULTS, rows_of, tables_of

HEAD = """\
# Claims, measured

Paceline follows five texts on fast and parallel training, each of which states figures and rules.
This page has one line for each of them that can be measured without a GPU: what is said, what was
measured, and whether that agrees. Figures and verdicts are made from the pages of
[results/](../results) by `docs/generate.py`; each page names its command, machine and commit, so a
line changes with its page. A figure of the hardware *holds* if it is within a factor of two of what
is said, or of its range.

The texts: *13*, the chapter on computational performance of "Dive into Deep Learning" (Zhang et
al.), by section, and *notes* on it; *lesson*, on GPUs and data parallelism; *node*, a session on
scaling up on one node; *training*, notes on training with GPUs, on whose protocols
[protocols.md](protocols.md) has the papers.

"""
UNMEASURED = """\
## Not measured

These need an accelerator, and no figure here is from one: two GPUs at once, `non_blocking` copies
from pinned memory, tensor cores (up to ten times as fast, sizes that are multiples of 8 and 16),
mixed precision with a scaler, NVLink and PCIe, the throughput of 16-bit against 32-bit numbers, and
NCCL's rings. `paceline probe`, `paceline bench overlap`, `paceline bench copies` and `paceline
bench throughput` measure them where there is one. Prices, years and opinions are left out.
"""
_CLOSE = 2.0


class Claim(NamedTuple):
    """A line: the text, what it says, what was measured, if that agrees, the page of results/."""

    text: str
    said: str
    measured: str
    verdict: str
    page: str


class Figures:
    """The rows of results/claims.md by name."""

    def __init__(self) -> None:
        self._rows = {row["figure"]: row for row in rows_of("claims")}

    def __getitem__(self, name: str) -> float:
        return float(self._rows[name]["value"])

    def __contains__(self, name: str) -> bool:
        return name in self._rows

    def text(self, name: str) -> str:
        return self._rows[name]["as text"]


def page() -> str:
    figures = Figures()
    sections = {
        "Compilers and queues": [*compilers(figures), *queues()],
        "Hardware": [*hardware(figures), *memory(figures)],
        "Processes and threads": [*threads(figures)],
        "Precision and arithmetic": [*arithmetic(figures)],
        "Ways to split": [*splits(figures), *sizes()],
        "Batches and averages": [*batches(figures), *averages()],
        "Parameter servers and protocols": [*servers(), *protocols(), *batch_protocols()],
    }
    lines = list[str]()
    for title, claims in sections.items():
        lines += [
            f"## {title}",
            "",
            "| in | said | measured | verdict | by |",
            "|---|---|---|---|---|",
        ]
        lines += [
            f"| {text} | {said} | {measured} | {verdict} | {command_of(name)} |"
            for text, said, measured, verdict, name in claims
        ]
        lines.append("")
    return "\n".join([HEAD + lines[0], *lines[1:], UNMEASURED])


def command_of(name: str) -> str:
    """The command that made a page of results/, as a link to it."""
    match = re.search(r"^`(.+?)(?: --write)?`", (RESULTS / f"{name}.md").read_text(), re.MULTILINE)
    assert match is not None, name
    return f"[`{match[1]}`](../results/{name}.md)"


def holds(is_true: bool, otherwise: str = "does not hold") -> str:
    return "holds" if is_true else f"**{otherwise}**"


def about(value: float, said: float) -> str:
    return holds(said / _CLOSE <= value <= said * _CLOSE)


def near(value: float, least: float, most: float, *, is_rate: bool = False) -> str:
    """Judge a figure of the hardware by the range that a text gives; a rate is better if higher."""
    if least / _CLOSE <= value <= most * _CLOSE:
        return "holds"
    return "**better here**" if is_rate == (value > most) else "**worse here**"


def first_number(text: str) -> float:
    """The first number of a cell: ``0.937 (0.863 to 0.984)`` is 0.937."""
    match = re.search(r"[-+]?\d[\d,]*\.?\d*(?:e[-+]\d+)?", text)
    assert match is not None, text
    return float(match[0].replace(",", ""))


def block_line(page_name: str, start: str, number: int = 0) -> list[str]:
    """The columns of the line of a page's block that begins with a word."""
    lines = (RESULTS / f"{page_name}.md").read_text().splitlines()
    found = [line for line in lines if re.match(rf"{re.escape(start)}\s{{2,}}", line)]
    return re.split(r"\s{2,}", found[number].strip())


def seconds(text: str) -> float:
    """The seconds of a duration as people read it: ``844 ms``, ``1.02 s``, ``24.3 us``."""
    number, unit = text.split()
    return float(number) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[unit]


# -- one section each ------------------------------------------------------------------------------


def compilers(figures: Figures) -> Iterator[Claim]:
    eager, script = block_line("compile", "eager"), block_line("compile", "script")
    ratio = float(script[4])
    yield Claim(
        "13.1",
        "TorchScript can make a model significantly faster (an MLP, 1,000 calls)",
        f"{eager[2]} a call, scripted {script[2]}: {ratio} times as fast, ahead after {script[6]}",
        holds(ratio > 1.1),
        "compile",
    )
    compiled = block_line("compile", "compile")
    yield Claim(
        "notes",
        "what is compiled is faster (the same MLP by `torch.compile`)",
        f"{compiled[2]} a call: {compiled[4]} times as fast",
        holds(float(compiled[4]) > 1.1, "does not hold for a small model"),
        "compile",
    )
    yield Claim(
        "13.1",
        "a compiler that sees `print((1 + 2) + (3 + 4))` prints 10 without adding",
        f"Python's own compiler keeps {figures.text('constant_folded')}",
        holds(bool(figures["constant_folded"])),
        "claims",
    )
    saved = [row for row in rows_of("export") if row["format"] == "torchscript"]
    worst = max(float(row["max difference, batch 1"]) for row in saved)
    yield Claim(
        "13.1",
        "a scripted model is saved and runs elsewhere as it did here",
        f"{len(saved)} models loaded in another process: outputs differ by at most {worst:.1e}",
        holds(worst <= 1e-5),
        "export",
    )


def queues() -> Iterator[Claim]:
    for name, said in (
        ("blocking", "10,000 blocking calls take 10,000 (t1 + t2 + t3)"),
        ("queued", "10,000 queued calls take about t1 + 10,000 t2 + t3"),
    ):
        _, measured, predicted, error, _ = block_line("async", name)
        off = abs(float(error.rstrip("%")))
        yield Claim("notes", said, f"{measured}, by this {predicted}", holds(off <= 5.0), "async")
    numpy, torch = (
        seconds(block_line("async", name)[1]) for name in ("numpy", "torch, synchronised")
    )
    yield Claim(
        "13.2",
        "ten random 1000 x 1000 matrices and their squares: torch is orders of magnitude faster "
        "than numpy",
        f"on the CPU {numpy / torch:.1f} times",
        holds(numpy / torch >= 10, "does not hold on a CPU"),
        "async",
    )
    _, alone, _, both, *_ = block_line("async", "two processes")
    yield Claim(
        "13.3",
        "work on two devices at once takes as long as on one",
        f"two cores: {alone} alone, {both} both",
        holds(seconds(both) <= 1.1 * seconds(alone)),
        "async",
    )
    _, compute, copy, both, spread, _ = block_line("async", "by a second thread")
    summed_s, (least_s, most_s) = (
        seconds(compute) + seconds(copy),
        map(seconds, spread.split(" to ")),
    )
    yield Claim(
        "13.3",
        "computing and copying at once take less than one after the other",
        f"{compute} and {copy}, at once {both} ({spread})",
        holds(most_s < summed_s) if not least_s <= summed_s <= most_s else "cannot be told here",
        "async",
    )


def hardware(figures: Figures) -> Iterator[Claim]:
    for name, said, least, most in (
        ("l1_latency_s", "a load from L1: 1.5 ns", 1.5e-9, 1.5e-9),
        ("l2_latency_s", "from L2: 5 ns", 5e-9, 5e-9),
        ("l3_latency_s", "from L3: 16 to 40 ns", 16e-9, 40e-9),
        ("memory_latency_s", "from memory: 46 to 120 ns", 46e-9, 120e-9),
        ("memory_read_bytes_per_s", "memory reads 40 to 100 GB/s", 40e9, 100e9),
        ("disk_read_latency_s", "a random read of an SSD: 120 us", 120e-6, 120e-6),
        ("disk_reads_per_s", "an SSD makes 100,000 to 500,000 of them a second", 100e3, 500e3),
        ("l1d_bytes", "L1 holds 32 to 64 KiB", 32 << 10, 64 << 10),
        ("l2_bytes", "L2 holds 256 to 512 KiB", 256 << 10, 512 << 10),
        ("l3_bytes", "L3 holds 4 to 8 MiB, up to 256 MiB in servers", 4 << 20, 256 << 20),
        ("vector_bits", "vector registers are typically 512 bits wide", 512, 512),
    ):
        if name in figures:
            value = figures[name]
            is_rate = not name.endswith("latency_s")
            verdict = near(value, least, most, is_rate=is_rate)
            if name == "vector_bits":
                verdict = holds(value == most)
            yield Claim("13.4, notes", said, figures.text(name), verdict, "claims")


def memory(figures: Figures) -> Iterator[Claim]:
    ratio = figures["disk_read_bytes_per_s"] / (4096 * figures["disk_reads_per_s"])
    yield Claim(
        "notes",
        "an SSD is made for large blocks, 256 KB or more",
        f"blocks of 1 MiB: {ratio:.1f} times the bytes of as many reads of 4 KiB as it makes",
        holds(ratio > 2),
        "claims",
    )
    ratio = figures["memory_latency_s"] / figures["l1_latency_s"]
    yield Claim(
        "13.4",
        "L1 is about 500 times as fast as memory for random access (by the same text's table, 31 "
        "to 80 times)",
        f"{ratio:.0f} times",
        about(ratio, 500),
        "claims",
    )
    ratio = figures["memory_latency_s"] / figures["memory_burst_latency_s"]
    yield Claim(
        "notes",
        "after the first word of a burst the next arrive 500 times as fast",
        f"{ratio:.0f} times as fast as single loads",
        about(ratio, 500),
        "claims",
    )
    ratio = figures["memory_latency_s"] / figures["memory_banks_latency_s"]
    yield Claim(
        "notes",
        "memory of four banks is read four times as fast, if the data lie in all",
        f"16 loads that do not wait for each other: {ratio:.1f} times as fast each",
        holds(ratio >= 4),
        "claims",
    )


def threads(figures: Figures) -> Iterator[Claim]:
    python, library = figures["threads_python_speedup"], figures["threads_library_speedup"]
    yield Claim(
        "lesson",
        "Python's lock slows threads down; two may be slower than one",
        f"Python code in two threads: {python:.2f} times as fast; a library's, which releases the "
        f"lock, {library:.2f}",
        holds(python < 1.1),
        "claims",
    )
    processes = figures["processes_python_speedup"]
    yield Claim(
        "lesson",
        "processes always run in parallel",
        f"two: {processes:.2f} times as fast as one",
        holds(processes > 1.2),
        "claims",
    )
    for what, name in (
        ("to start and end a process costs more than a thread", "start_s"),
        ("processes talk more slowly than threads", "talk_s"),
    ):
        process, thread = figures.text(f"processes_{name}"), figures.text(f"threads_{name}")
        is_true = figures[f"processes_{name}"] > figures[f"threads_{name}"]
        yield Claim("lesson", what, f"{process}, a thread {thread}", holds(is_true), "claims")


def arithmetic(figures: Figures) -> Iterator[Claim]:
    ratio = figures["tanh_relu_ratio"]
    yield Claim(
        "lesson",
        "ReLU is light, tanh heavy",
        f"tanh takes {ratio:.2f} times as long",
        holds(ratio > 1.1),
        "claims",
    )
    yield Claim(
        "lesson",
        "autocast is only for CUDA",
        f"on the CPU a Linear computes in {figures.text('autocast_cpu')}",
        holds(not figures["autocast_cpu"], "out of date"),
        "claims",
    )
    yield Claim(
        "lesson",
        "`torch.utils.bottleneck` finds what is slow",
        f"{figures.text('bottleneck')} in this torch",
        holds(bool(figures["bottleneck"]), "out of date"),
        "claims",
    )
    off = figures["gradient_sum_error"]
    yield Claim(
        "training",
        "the sum of the workers' gradients is the gradient of their total loss",
        f"two halves of LeNet's batch: they differ by {off:.1e}",
        holds(off < 1e-12),
        "claims",
    )


def splits(figures: Figures) -> Iterator[Claim]:
    layer, data = figures["layer_bytes"], figures["data_bytes"]
    yield Claim(
        "notes",
        "a split over channels moves huge amounts of data",
        f"LeNet, two workers, an update: {figures.text('layer_bytes')}; over layers "
        f"{figures.text('network_bytes')}, over data {figures.text('data_bytes')}",
        holds(layer > 2 * data, "does not hold for LeNet"),
        "claims",
    )
    rows = rows_of("splits")
    steps = {
        (row["what"], row["workers"], row["split"]): seconds(row["measured"].partition(" (")[0])
        for row in rows
        if row["what"].startswith("a step") and row["predicted / measured"]
    }
    cases = {
        (row["what"], row["workers"])
        for row in rows
        if row["what"].startswith("a step") and row["split"] == "layer"
    }
    fastest = [
        min(("data", "network", "layer"), key=lambda split: steps.get((*case, split), math.inf))
        for case in cases
    ]
    yield Claim(
        "notes, 13.5",
        "a split over layers is hard to balance and over channels sends too much; over data is "
        "the most practical",
        f"of {len(cases)} cases (a model, 2 or 3 workers) over data was the fastest of the three "
        f"in {fastest.count('data')}, over layers in {fastest.count('network')}, over channels in "
        f"{fastest.count('layer')}",
        holds(fastest.count("data") > len(cases) / 2),
        "splits",
    )


def sizes() -> Iterator[Claim]:
    rows = rows_of("splits")
    held = {row["split"]: row for row in rows if row["what"].startswith("memory")}
    yield Claim(
        "notes",
        "with more devices for its data a model cannot be larger",
        f"100 million parameters, two workers: each holds {held['data']['measured']}, alone "
        f"{held['none']['measured']}; of three kinds of shards {held['shard-3']['measured']}",
        holds(mebibytes(held["data"]["measured"]) >= mebibytes(held["none"]["measured"])),
        "splits",
    )
    large = rows[0]
    yield Claim(
        "node",
        "from 500 million parameters on, split the model",
        f"{large['what'].partition(', ')[2]}: no copy fits; {large['split']} takes "
        f"{large['measured']}",
        "a matter of memory, not of that number",
        "splits",
    )


def mebibytes(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"KiB": 1 / 1024, "MiB": 1.0, "GiB": 1024.0}[unit]


def batches(figures: Figures) -> Iterator[Claim]:
    ratio = figures["batch_throughput_ratio"]
    yield Claim(
        "training",
        "larger batches raise the throughput",
        f"LeNet, 256 over 16 samples: {ratio:.2f} times",
        holds(ratio > 1.1),
        "claims",
    )
    ratio = figures["gradient_noise_ratio"]
    yield Claim(
        "training",
        "small batches make noisier gradients",
        f"16 samples: {ratio:.1f} times the variance of 256 (16, if samples are independent)",
        holds(8 <= ratio <= 32),
        "claims",
    )


def averages() -> Iterator[Claim]:
    rows = rows_of("averaging")
    for task in ("lenet", "softmax"):
        errors = {
            row["what is averaged"]: float(row["test error"]) for row in rows if row["task"] == task
        }
        once, each = errors["models, once at the end"], errors["gradients, each step"]
        what = "a network" if task == "lenet" else "a convex model"
        yield Claim(
            "training",
            f"to average models that were trained apart gives no model of the whole ({what})",
            f"{task}: test error {once:.2f}, {each:.2f} with gradients averaged each step",
            holds(once > 1.5 * each, "does not hold"),
            "averaging",
        )
    scaling = {row["what"]: row["measured"] for row in rows_of("scaling")}
    beside_bound = scaling["efficiency : bound [95 %]"]
    yield Claim(
        "training",
        "to exchange gradients takes time, so scaling efficiency is below 1",
        f"LeNet, two workers: {scaling['efficiency of two workers']}; beside two processes that "
        f"exchange nothing {beside_bound}",
        holds(float(beside_bound.rstrip("]").rpartition(", ")[2]) < 1),
        "scaling",
    )


def servers() -> Iterator[Claim]:
    rings = {
        row["figure"]: float(row["value"]) for row in rows_of("claims") if "ring_" in row["figure"]
    }
    yield Claim(
        "13.7",
        "a ring takes about as long however many take part",
        f"16 ranks take {rings['ring_16_s'] / rings['ring_2_s']:.2f} times as long as 2 (computed, "
        "without latency)",
        "by its formula, up to a factor of two",
        "claims",
    )
    load = {row["workers"]: row for row in tables_of("scaling")[1]}
    memory = load["100"]["memory beyond the slots, times the parameters"]
    yield Claim(
        "training",
        "100 workers with 10,000 weights: the server needs memory for 100 x 10,000",
        f"beside the workers' own gradients {memory} times the parameters: pushes are summed as "
        "they arrive",
        holds(float(memory) >= 50),
        "scaling",
    )
    few, many = (first_number(load[n]["the link's time a push, us"]) for n in ("2", "100"))
    yield Claim(
        "training",
        "with many workers the server's link becomes the bottleneck",
        f"a push takes {few:.0f} us with 2 workers, {many:,.0f} us with 100",
        holds(many > 2 * few),
        "scaling",
    )


def update_ms(protocol: str, k: int) -> float:
    """The milliseconds of an update of 8 workers with exponential times, measured."""
    (row,) = (
        row
        for row in rows_of("live_theory")
        if (row["protocol"], row["K"], row["X"]) == (protocol, str(k), "exp:50ms")
    )
    return first_number(row["measured, ms an update"])


def protocols() -> Iterator[Claim]:
    full, all_async = update_ms("k-sync", 8), update_ms("k-async", 8)
    yield Claim(
        "training",
        "K-sync and K-async of all P learners are fully synchronous",
        f"8 workers: {full:.0f} and {all_async:.0f} ms an update",
        holds(abs(full / all_async - 1) < 0.1),
        "live_theory",
    )
    one, alone = update_ms("k-async", 1), update_ms("k-batch-async", 1)
    yield Claim(
        "training",
        "1-async is async: an update for each gradient",
        f"{one:.1f} ms an update, a gradient each {alone:.1f} ms",
        holds(abs(one / alone - 1) < 0.1),
        "live_theory",
    )
    yield Claim(
        "training",
        "who waits for the slowest loses the gain; async waits for nobody",
        f"8 workers with exponential times: {full:.0f} ms an update, async {one:.1f} ms; 8 of its "
        f"updates have as many gradients: {8 * one:.0f} ms",
        holds(8 * one < full),
        "live_theory",
    )


def batch_protocols() -> Iterator[Claim]:
    for kind in ("sync", "async"):
        plain, batch = update_ms(f"k-{kind}", 4), update_ms(f"k-batch-{kind}", 4)
        yield Claim(
            "training",
            f"K-batch-{kind} takes less time an update than K-{kind}",
            f"K = 4 of 8: {batch:.0f} ms, {plain:.0f} ms",
            holds(batch < plain),
            "live_theory",
        )
    paper = {row["what"]: row for table in tables_of("paper") for row in table if "ours" in row}
    errors = paper["ln(loss) at the end: K-sync and K-batch-sync, within 0.03"]
    yield Claim(
        "training",
        "and its error converges as that of K-sync",
        f"ln(loss) at the end: {errors['ours']}",
        holds(errors["agrees"] == "yes"),
        "paper",
    )
    ends = [
        first_number(paper[f"{name}: ln(loss) at the end"]["ours"])
        for name in ("full-sync", "async")
    ]
    yield Claim(
        "training",
        "stale gradients converge to a worse loss than synchronous ones",
        f"ln(loss) after 500 updates: async {ends[1]:.3f}, full-sync {ends[0]:.3f} (whose updates "
        "have more gradients each)",
        holds(ends[1] > ends[0]),
        "paper",
    )
