"""``python -m paper``: make the figures, with progress on standard error, and write the page.

python -m paper              all, into results/paper.md
python -m paper --only 8     one, into results/paper-8.md
"""

import argparse
import functools
import os
import platform
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import torch

from paceline.data.fetch import choose
from paceline.errors import PacelineError

from .figures import FIGURES
from .figures.base import Effort, Figure, Workshop
from .page import FigureResult, summarise, write_page
from .tasks import digits

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m paper", description="Make the paper's figures."
    )
    parser.add_argument("--only", nargs="+", choices=list(FIGURES), help="make these figures")
    parser.add_argument("--out", type=Path, help="the page [default: results/paper.md; runs/...]")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the steps are small: a second thread would only wait
    names = arguments.only or list(FIGURES)
    path = arguments.out or ROOT / "results" / "paper.md"
    if arguments.only and not arguments.out:
        path = ROOT / "runs" / f"paper-{'-'.join(names)}.md"
    start_s = time.perf_counter()
    chooser = partial(choose, fetch_missing=True, say=lambda text: print(text, file=sys.stderr))
    images = functools.cache(lambda: digits(chooser))
    try:
        results = [
            make(figure, Workshop(effort=Effort(), images=images, say=_progress(figure, start_s)))
            for figure in map(FIGURES.__getitem__, names)
        ]
    except PacelineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    command = f"python -m paper --only {' '.join(names)}" if arguments.only else "make paper"
    write_page(path, results, _machine(), command)
    print("\n".join([*summarise(results), str(path)]))
    return 0


def make(figure: Figure, shop: Workshop) -> FigureResult:
    """Draw one figure, and time it."""
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    shop.say("begins")
    drawing = figure.draw(shop)
    return FigureResult(
        figure=figure, drawing=drawing, wall_s=time.perf_counter() - start_s,
        cpu_s=time.process_time() - start_cpu_s,
    )  # fmt: skip


def _progress(figure: Figure, start_s: float) -> "partial[None]":
    return partial(_say, figure.number, start_s)


def _say(name: str, start_s: float, text: str) -> None:
    print(f"[{time.perf_counter() - start_s:4.0f} s] {name}: {text}", file=sys.stderr, flush=True)


def _machine() -> str:
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    return (
        f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}, Python "
        f"{platform.python_version()}, torch {torch.__version__}, commit "
        f"{commit.strip() or 'unknown'}"
    )


if __name__ == "__main__":
    sys.exit(main())
