"""One device: the tables of ``paceline bench compile`` and ``paceline bench async``.

    python bench/one_device.py compile [--write]      the chapter's MLP, 1,000 calls, every way
    python bench/one_device.py async [--write]        10,000 calls blocking and queued

The same code as the verbs, on a page with machine, command and spread. Writes results/compile.md
and results/async.md.
"""

import argparse
import sys

import torch

from paceline.bench.asynchrony import measure_asynchrony, numpy_and_torch, render_asynchrony
from paceline.bench.compiling import WaysQuestion, compare_ways, render_ways
from paceline.bench.overlap import measure_overlap, measure_parallel
from paceline.bench.samples import render_together
from table import RESULTS, machine

CALLS = 10_000


def compile_lines() -> list[str]:
    threads = torch.get_num_threads()
    comparison = compare_ways(
        WaysQuestion(calls=1000, threads=threads), lambda line: print(line, file=sys.stderr)
    )
    return render_ways(comparison)


def async_lines() -> list[str]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = 4000 if device.type == "cuda" else 512
    lines = render_asynchrony(
        measure_asynchrony(device, CALLS), numpy_and_torch(device), device.type
    )
    overlap = measure_overlap(device, size, 50)
    parallel = measure_parallel(device, size, 50)
    return [
        *lines,
        "",
        "bench overlap:",
        overlap.work,
        *render_together(overlap.ways, "computing", "copying"),
        *overlap.notes,
        "",
        "bench parallel:",
        f"{parallel.places}; {parallel.work}",
        *render_together((parallel.result,), "one", "other"),
    ]


PAGES = {
    "compile": ("Eager, TorchScript, torch.compile, export and AOTInductor", compile_lines),
    "async": ("Asynchrony, overlap, parallelism", async_lines),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("page", choices=PAGES)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    title, make_lines = PAGES[arguments.page]
    machine_note = machine()
    lines = make_lines()
    print("\n".join(lines))
    if arguments.write:
        command = f"`python {' '.join(sys.argv)}`"
        page = [f"# {title}", "", command, "", "```text", *lines, "```", "", f"{machine_note}.", ""]
        (RESULTS / f"{arguments.page}.md").write_text("\n".join(page))


if __name__ == "__main__":
    main()
