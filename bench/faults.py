"""The output of a run for each kind of failure.

    python bench/faults.py [--only stop] [--write]

Every form of ``--fault``, a data set that hangs, and a run whose launcher is killed and which is
then resumed: each in a short run of softmax with four workers, from the command line. The page has
the lines that the run prints for people, and its exit code. Writes results/faults.md.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import dataclass
from pathlib import Path

import paceline
from table import RESULTS, machine

PACKAGE = Path(paceline.__file__).parent.parent
MESSAGE = re.compile(r"^(note|error|warning|stopped|resumed)\b", re.IGNORECASE)
SHAPE = ("--workers", "4", "--mini-batch-size", "16", "--delay", "20ms")
LENGTH = ("--updates", "120")
HANGS = """
import time, torch, paceline
from pathlib import Path
from torch.utils.data import DataLoader, Dataset

class Photos(Dataset):
    def __len__(self):
        return 4000
    def __getitem__(self, index):
        if index == 900 and not Path("hung").exists():
            Path("hung").touch()
            time.sleep(3600)
        return torch.randn(8), index % 2

pace = paceline.connect()
model = torch.nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(Photos(), batch_size=64))
for epoch in pace.epochs(2):
    for inputs, targets in loader:
        with pace.step():
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run."""

    name: str
    flags: tuple[str, ...]
    script: str = ""
    then: tuple[str, ...] = ()
    """A second command line, after the first has ended."""


def fault(text: str, *flags: str, length: tuple[str, ...] = LENGTH) -> Case:
    return Case(name=text, flags=(*SHAPE, *length, "--fault", text, *flags))


CASES = (
    fault("kill worker 1 at update 40", "--respawn"),
    fault("kill worker 1 at update 40", "--protocol", "k-sync:3"),
    fault("stop worker 2 at step 40 for 5s", "--respawn"),
    fault("slow worker 3 at 1s for 10s by 10x"),
    fault("slow worker 3 at 1s for 10s by 10x", "--protocol", "async",
          length=("--updates", "400")),
    fault("raise in worker 0 at update 40"),
    fault("raise in worker 0 at update 40", "--on-worker-error", "continue"),
    fault("drop push of worker 1 at update 40", "--path", "store", "--stall-after", "2"),
    fault("delay push of worker 1 at update 40 by 1s", "--path", "store"),
    fault("fill disk at 1s for 1s"),
    fault("corrupt trace.jsonl at update 40"),
    Case(name="kill launcher at update 60, and go on",
         flags=(*SHAPE, *LENGTH, "--fault", "kill launcher at update 60",
                "--checkpoint-every", "20 updates"),
         then=("train", "softmax", "--resume", "runs/one", *LENGTH)),
    Case(name="a data set that hangs", flags=("--workers", "4", "--respawn", "--stall-after", "2"),
         script=HANGS),
)  # fmt: skip


def run(case: Case, folder: Path) -> list[str]:
    """Return the messages of a case, and its exit code."""
    verb = ["train", "softmax"]
    if case.script:
        (folder / "train.py").write_text(case.script)
        verb = ["launch"]
    tail = ["train.py"] if case.script else []
    lines = command([*verb, *case.flags, "--run-dir", "runs/one", *tail], folder)
    if case.then:
        lines += ["", f"$ paceline {' '.join(case.then)}", *command(list(case.then), folder)]
    return lines


def command(arguments: list[str], folder: Path) -> list[str]:
    result = subprocess.run(
        [sys.executable, "-m", "paceline", *arguments], cwd=folder, text=True, timeout=120,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, "COLUMNS": "400"},
    )  # fmt: skip
    shown: list[str] = []
    is_quoting = False
    output = result.stdout.replace(f"{folder}/", "").replace(f"{PACKAGE}/", "")
    for line in map(str.rstrip, output.splitlines()):
        if MESSAGE.match(line):
            shown += textwrap.wrap(line, 100, subsequent_indent="  ")
            is_quoting = line.endswith(":")
        elif is_quoting and line:
            shown.append(line)
        else:
            is_quoting = False
    return [*shown, f"exit code {result.returncode}"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    pages = []
    for case in CASES:
        if options.only not in case.name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            lines = run(case, Path(folder))
        section = [
            f"## {case.name}",
            "",
            f"`{' '.join(case.flags)}`",
            "",
            *(f"    {line}" for line in lines),
            "",
        ]
        print("\n".join(section), flush=True)
        pages += section
    if options.write:
        head = ["# What a run says of what goes wrong", "", "`python bench/faults.py --write`", ""]
        (RESULTS / "faults.md").write_text("\n".join([*head, *pages, machine(), ""]))


if __name__ == "__main__":
    main()
