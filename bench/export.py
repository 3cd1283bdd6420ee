"""Exported models: size, equality and latency, every model in every format.

    python bench/export.py [--models lenet,mlp] [--formats aoti] [--write]

The same code as ``paceline export``: the file is loaded again and compared with the model with
batch 1 and 7, then both are called in turn. The row of a format that is not possible here says why.
Writes results/export.md.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch

from paceline.bench.exporting import Export, Latency, Wanted, export
from paceline.bench.samples import quartiles
from paceline.errors import ConfigError
from paceline.exports import FORMATS
from paceline.exports.subject import find_subject
from paceline.plan import format_bytes
from paceline.report.text import three_figures
from table import machine, write_table

MODELS = ("lenet", "mlp", "resnet18", "transformer")
HEADER = (
    *("model", "format", "size on disk", "its weights"),
    *("max difference, batch 1", "max difference, batch 7"),
    *("model eager to file, batch 1", "model eager to file, batch 7"),
)


def row(result: Export) -> list[str]:
    differences = [f"{value:.1e}" for value in result.max_differences.values()]
    figures = (format_bytes(result.num_bytes), format_bytes(result.weights_bytes))
    latencies = [_latency(latency) for latency in result.latencies]
    return [result.subject, result.format, *figures, *differences, *latencies]


def _latency(latency: Latency) -> str:
    texts = [
        f"{three_figures(samples.median_s)} ({quartiles(samples)})"
        for samples in (latency.model, latency.file)
    ]
    return " to ".join(texts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    machine_note = machine()
    rows = []
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for model in arguments.models.split(","):
            for name in arguments.formats.split(","):
                wanted = Wanted(form=name, path=Path(folder) / f"{model}{FORMATS[name].suffix}")
                try:
                    cells = row(export(find_subject(model), wanted, lambda line: None))
                except ConfigError as error:
                    cells = [model, name, f"not possible: {error}", *["-"] * (len(HEADER) - 3)]
                rows.append(cells)
                print(" | ".join(cells), file=sys.stderr, flush=True)
    note = (
        "Differences are absolute, the larger one of two inputs; allowed are 1e-5 of 1 or of the "
        "largest output. Latency: one thread, median of 15 blocks of calls in turn, with the "
        f"middle half.\n\n{machine_note}."
    )
    if arguments.write:
        write_table("export", "Exported models beside their models", HEADER, rows, note)


if __name__ == "__main__":
    main()
