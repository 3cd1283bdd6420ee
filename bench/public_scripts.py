"""A public script with the lines that `--check` prints, beside the same script without them.

    python bench/public_scripts.py FOLDER SCRIPT [--main OTHER] [--args "..."] [--cuts FILE]
                                   [--first MODULE]

FOLDER holds the script as it was published, and what it imports. It is copied twice, one copy is
patched by what `paceline launch --check` prints, both get the same cuts (FILE: a JSON object,
"both" or "plain" to a list of [old, new]; what is small enough for a few seconds, data that are
made up), and then six runs, each in a copy of its own:

    plain, one         python SCRIPT, as published: equal to the last bit
    fixed, full-sync   in fixed order, without dropout and noise, batch norm on its running
                       statistics, float64: python SCRIPT beside two workers
    k-batch-async:2, local-sgd:4   as published, two workers: to the end, equal parameters

A script is asked for what its optimizers hold when its last line is done; noise that a "fixed" run
draws is a constant. MODULE is imported before the script's first line (what stands in for a package
that is missing). Prints one row of results/public-scripts.md.
"""

import argparse
import difflib
import functools
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

import paceline

FOLDER, FIXED, FIRST = "PUBLIC_FOLDER", "PUBLIC_FIXED", "PUBLIC_FIRST"
"""What a script that is watched is told: where to save, whether all is fixed, what comes first."""
LIMIT_S, REFUSED = 300, "refused"
BEGIN = "import public_scripts; public_scripts.begin()\n"
END = "\npublic_scripts.end()\n"
WORKERS = ["launch", "--workers", "2", "--protocol"]

# -- in the script ---------------------------------------------------------------------------

_optimizers: list[torch.optim.Optimizer] = []


def begin() -> None:
    """Seed everything, note each optimizer that is made, and fix what is to be fixed."""
    if first := os.environ.get(FIRST):
        __import__(first)
    _seed(0)
    made = torch.optim.Optimizer.__init__

    @functools.wraps(made)
    def noted(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        if _is_the_scripts():
            _optimizers.append(self)

    torch.optim.Optimizer.__init__ = noted  # type: ignore[method-assign]
    if os.environ.get(FIXED):
        _fix()


def _is_the_scripts() -> bool:
    """Whether an optimizer is made by no file of Paceline's, which may make one like it."""
    frame = sys._getframe(2)
    while str(frame.f_globals.get("__name__")).startswith("torch."):
        assert frame.f_back is not None
        frame = frame.f_back
    return not str(frame.f_globals.get("__name__")).startswith("paceline.")


def turns(numbers: range) -> Iterator[int]:
    """What a plain twin goes over where the script for Paceline goes over `pace.updates`."""
    for place, number in enumerate(numbers):
        _seed(paceline.step_seed(0, 0, place))
        yield number


def end() -> None:
    """Save what the optimizers hold: parameters in their order, and learning rates."""
    groups = [group for optimizer in _optimizers for group in optimizer.param_groups]
    held = {
        "parameters": [p.detach().clone() for group in groups for p in group["params"]],
        "rates": [group["lr"] for group in groups],
    }
    torch.save(held, Path(os.environ[FOLDER]) / f"{os.getpid()}.pt")


def _seed(number: int) -> None:
    random.seed(number)
    torch.manual_seed(number)
    numpy.random.seed(number & 0xFFFFFFFF)


def _fix() -> None:
    """Nothing at random, nothing that looks at a whole batch, and rounding of float64."""
    torch.set_default_dtype(torch.float64)
    torch.FloatTensor = torch.DoubleTensor  # type: ignore[assignment,misc]
    Tensor.float = Tensor.double  # type: ignore[method-assign]
    for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout"):
        setattr(functional, name, lambda input, *args, **kwargs: input)
    nn.modules.batchnorm._BatchNorm.forward = (  # type: ignore[method-assign]
        lambda self, input: functional.batch_norm(
            input, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
        )
    )
    _with(nn.RNNBase, "__init__", dropout=0.0)
    _with(DataLoader, "__init__", shuffle=False)
    for name in ("randn", "rand", "randn_like", "rand_like"):
        setattr(torch, name, _constant(getattr(torch, name)))
    for name in ("normal", "uniform", "rand", "randn", "random"):
        setattr(numpy.random, name, _constant_array(getattr(numpy.random, name)))


def _with(owner: type, name: str, **fixed: Any) -> None:
    """Call `owner.name` with these arguments in the place of those that are given by name."""
    called = getattr(owner, name)

    @functools.wraps(called)
    def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
        return called(self, *args, **{n: fixed.get(n, value) for n, value in kwargs.items()})

    setattr(owner, name, changed)


def _constant(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def drawn(*args: Any, **kwargs: Any) -> Tensor:
        made = draw(*args, **kwargs)
        return made if kwargs.get("generator") else made.detach().fill_(0.3)

    return drawn


def _constant_array(draw: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: numpy.full_like(draw(*args, **kwargs), 0.3)


# -- beside it -------------------------------------------------------------------------------


class Ended(NamedTuple):
    """How a run ended, what it printed, and what its workers held, one entry a worker."""

    code: int
    printed: str
    held: list[dict[str, Any]]

    @property
    def is_done(self) -> bool:
        return self.code == 0 and bool(self.held)


class Watched(NamedTuple):
    """A script that is asked what it holds: its path, its own arguments, what comes first."""

    path: str
    args: list[str]
    first: str

    def run(self, folder: Path, call: Sequence[str] = (), *, is_fixed: bool = False) -> Ended:
        """Run it in a copy of ``folder``: by python where ``call`` is empty, else by paceline."""
        with tempfile.TemporaryDirectory() as saved:
            place = Path(saved) / "run"
            shutil.copytree(folder, place)
            paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
            told = {FOLDER: saved, FIRST: self.first, FIXED: "1" if is_fixed else ""}
            environment = os.environ | told | {"PYTHONPATH": os.pathsep.join(paths)}
            paced = ["-m", "paceline", *call] if call else []
            command = [sys.executable, *paced, Path(self.path).name, *self.args]
            try:
                ended = subprocess.run(
                    command, cwd=(place / self.path).parent, env=environment, text=True,
                    stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=LIMIT_S, check=False,
                )  # fmt: skip
            except subprocess.TimeoutExpired as late:
                return Ended(124, f"{late.stdout!r}\nlonger than {LIMIT_S} s", [])
            held = [torch.load(path) for path in sorted(Path(saved).glob("*.pt"))]
            return Ended(ended.returncode, ended.stdout, held)


def prepare(
    folder: Path, script: str, main: str, place: Path, cuts: dict[str, Any]
) -> tuple[str, str]:
    """Make `place`/plain and `place`/paced; what `--check` said, and lines added and changed."""
    for name in ("plain", "paced"):
        shutil.copytree(folder, place / name)
    home = (place / "paced" / script).parent
    command = [sys.executable, "-m", "paceline", "launch", "--check", Path(script).name]
    told = subprocess.run(command, cwd=home, capture_output=True, text=True, check=False)
    if told.returncode:
        return told.stdout + told.stderr, REFUSED
    subprocess.run(["patch", "-p0", "-s"], cwd=home, input=told.stdout, text=True, check=True)
    texts = [(place / name / script).read_text() for name in ("plain", "paced")]
    for name, text in zip(("plain", "paced"), texts, strict=True):
        for old, new in cuts.get("both", []) + (cuts.get(name, [])):
            if old not in text:
                print(f"{script}: no {old!r} to cut in {name}", file=sys.stderr)
            text = text.replace(old, new)
        (place / name / script).write_text(text)
        watch(place / name / main)
    return told.stderr, ", ".join(map(str, counted(*texts)))


def watch(script: Path) -> None:
    """Put the first and the last line into a script."""
    text = script.read_text()
    future = re.match(r"(?s).*^from __future__ [^\n]*\n", text, re.MULTILINE)
    first = future.end() if future else 0
    script.write_text(text[:first] + BEGIN + text[first:] + END)


def counted(old: str, new: str) -> tuple[int, int]:
    """Lines added, lines changed; indentation and empty lines not counted."""
    olds, news = (list(filter(None, map(str.strip, text.splitlines()))) for text in (old, new))
    added = changed = 0
    for kind, a, b, c, d in difflib.SequenceMatcher(None, olds, news, False).get_opcodes():
        if kind != "equal":
            changed += b - a
            added += max(0, (d - c) - (b - a))
    return added, changed


def apart(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference of a parameter, over the larger of 1 and the largest parameter."""
    pairs = list(zip(one["parameters"], other["parameters"], strict=True))
    if not all(torch.isfinite(a).all() and torch.isfinite(b).all() for a, b in pairs):
        return float("nan")
    scale = max(1.0, *(float(a.abs().max()) for a, _ in pairs))
    return max(float((a - b).abs().max()) for a, b in pairs) / scale


def is_equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one["rates"] == other["rates"] and all(
        torch.equal(a, b) for a, b in zip(one["parameters"], other["parameters"], strict=True)
    )


def why(ended: Ended) -> str:
    """How a run that was not done ended: the line that names an error, else the last one."""
    lines = [line.strip() for line in ended.printed.splitlines() if line.strip()] or [""]
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b.*: ", line)]
    return f"ended with {ended.code}: {(named or lines)[-1][:400]}"


def compare(place: Path, script: Watched) -> list[str]:
    """Four cells: one worker, full-sync, k-batch-async:2, local-sgd:4."""
    plain, one = script.run(place / "plain"), script.run(place / "paced")
    if not plain.is_done:
        print(plain.printed[-2000:], file=sys.stderr)
        return [f"the plain one {why(plain)}"]
    is_same = one.is_done and is_equal(plain.held[0], one.held[0])
    cells = ["equal" if is_same else why(one)]
    if one.is_done and not is_same:
        cells = [f"DIFFERS by {apart(plain.held[0], one.held[0]):.1e}"]
    for line in difflib.unified_diff(plain.printed.splitlines(), one.printed.splitlines(), n=0):
        print("   ", line[:160], file=sys.stderr)
    fixed = script.run(place / "plain", is_fixed=True)
    both = script.run(place / "paced", [*WORKERS, "full-sync"], is_fixed=True)
    if fixed.is_done and both.is_done:
        cells.append(f"{max(apart(fixed.held[0], held) for held in both.held):.1e}")
    else:
        cells.append("; ".join(why(one) for one in (fixed, both) if not one.is_done))
    for protocol in ("k-batch-async:2", "local-sgd:4"):
        ended = script.run(place / "paced", [*WORKERS, protocol])
        is_same = len(ended.held) == 2 and is_equal(*ended.held)
        cells.append(why(ended) if not ended.is_done else "yes" if is_same else "UNEQUAL")
        if cells[-1] != "yes":
            print(ended.printed[-1500:], file=sys.stderr)
    return cells


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("script", help="its path in FOLDER")
    parser.add_argument("--main", help="what is run, where it imports SCRIPT")
    parser.add_argument("--args", default="", help="what the script is called with")
    parser.add_argument("--cuts", type=Path, help="a JSON file")
    parser.add_argument("--first", default="", help="a module to import before the script")
    options = parser.parse_args()
    cuts = json.loads(options.cuts.read_text()) if options.cuts else {}
    with tempfile.TemporaryDirectory() as folder:
        main = options.main or options.script
        said, lines = prepare(options.folder, options.script, main, Path(folder), cuts)
        script = Watched(main, shlex.split(options.args), options.first)
        cells = ["-"] * 4 if lines == REFUSED else compare(Path(folder), script)
    print(" | ".join([options.script, lines, *cells, " ".join(said.split())]))


if __name__ == "__main__":
    main()
