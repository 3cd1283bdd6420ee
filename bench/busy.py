"""A worker that is busy on its own for five minutes, anywhere, is named and never ended.

    python bench/busy.py [--seconds 300] [--only PLACE ...] [--write]

One of two workers saves to a slow disk (it sleeps), validates (it computes), compiles (a child
process computes) or is held by a debugger (a tracer stops it): before ``prepare``, in a step,
between epochs, in ``pace.once()``, at the end of the script. All runs go at once, without
``--stall-after``; those that compute have the lowest priority. Exits with 1 if a worker was ended
or not named, or a run did not finish. Writes results/busy.md.
"""

import argparse
import itertools
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))
from paceline.report.summary import summarize
from runs import Run
from table import machine, write_table

PLACES = ("before prepare", "in a step", "between epochs", "in pace.once()", "at the end")
ACTIVITIES = ("saves", "validates", "compiles", "is debugged")
SAMPLES, EPOCHS = 24, 2
LAUNCH_GAP_S = 1.0
"""Seconds between two launches, since each imports torch."""
SLACK_S = 240.0
"""Seconds that a run may take beyond what its worker is busy."""
SCRIPT = '''
import ctypes, io, os, subprocess, sys, time
from pathlib import Path
import torch, paceline
from torch.utils.data import DataLoader, TensorDataset

place, what, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
TRACER = """
import ctypes, os, sys, time
SEIZE, INTERRUPT, DETACH, WALL = 0x4206, 0x4207, 17, 0x40000000
libc, pid = ctypes.CDLL(None, use_errno=True), int(sys.argv[1])
for request in (SEIZE, INTERRUPT):
    if libc.ptrace(request, pid, 0, 0):
        sys.exit(os.strerror(ctypes.get_errno()))
os.waitpid(pid, WALL)
time.sleep(float(sys.argv[2]))
libc.ptrace(DETACH, pid, 0, 0)
"""

class SlowDisk(io.BytesIO):
    def write(self, data):
        time.sleep(seconds)
        return super().write(data)

def saves():
    SlowDisk().write(b"weights")

def validates():
    os.nice(19)
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        torch.randn(64, 64) @ torch.randn(64, 64)

def compiles():
    code = f"import os, time; os.nice(19); end = time.monotonic() + {seconds}\\n"
    code += "while time.monotonic() < end: pass"
    subprocess.run([sys.executable, "-c", code], check=True)

def is_debugged():
    ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(-1), 0, 0, 0)  # anybody may trace it
    subprocess.run([sys.executable, "-c", TRACER, str(os.getpid()), str(seconds)], check=True)

def come(here):
    if here == place and pace.worker == 0 and not Path("begun").exists():
        Path("begun").touch()
        {"saves": saves, "validates": validates, "compiles": compiles,
         "is debugged": is_debugged}[what]()
        Path("over").touch()

pace = paceline.connect()
come("before prepare")
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.ones(SAMPLES, 2)), batch_size=4)
model, optimizer, loader = pace.prepare(model, optimizer, loader)
for epoch in pace.epochs(EPOCHS):
    for number, (x,) in enumerate(loader):
        with pace.step():
            if number == 1:
                come("in a step")
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
    come("between epochs")
    with pace.once() as is_first:
        if is_first:
            come("in pace.once()")
come("at the end")
'''
HEADER = (
    "place", "what it does", "busy, s", "named after, s", "as", "times named", "ended",
    "run ended well",
)  # fmt: skip
NOTE = (
    "Two workers between peers, all runs at once; the busy one is worker 0, which the other waits "
    "for. Named after: from its first busy second to the first note. Numbers of processes are "
    "left out of the text. Ended well: exit 0, each sample of each epoch in exactly one update, "
    "all workers alive."
)


@dataclass(slots=True, kw_only=True)
class Case:
    """One run.

    Attributes:
        lines: what it printed, and when.
    """

    place: str
    activity: str
    folder: Path
    lines: list[tuple[float, str]] = field(default_factory=list)
    code: int | None = None

    def carry_out(self, seconds: float) -> None:
        """Launch the run, and read its output until it ends."""
        script = self.folder / "train.py"
        text = SCRIPT.replace("SAMPLES", str(SAMPLES)).replace("EPOCHS", str(EPOCHS))
        script.write_text(text)
        command = [
            sys.executable, "-m", "paceline", "launch", "--workers", "2", "--device", "cpu",
            "--threads", "1", "--run-dir", "run", script.name, self.place, self.activity,
            str(seconds),
        ]  # fmt: skip
        process = subprocess.Popen(
            command, cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        killer = threading.Timer(seconds + SLACK_S, process.kill)
        killer.start()
        assert process.stdout is not None
        for line in process.stdout:
            self.lines.append((time.time(), line.rstrip()))
        self.code = process.wait()
        killer.cancel()

    @property
    def notes(self) -> list[tuple[float, str]]:
        """Return the notes about the busy worker, each with its seconds after the start."""
        if not (self.folder / "begun").exists():
            return []
        start_s = (self.folder / "begun").stat().st_mtime
        timed_lines = [
            (at_s - start_s, line) for at_s, line in self.lines if "worker 0 has not" in line
        ]
        return [(after_s, line) for after_s, line in timed_lines if after_s > 0]

    @property
    def busy_s(self) -> float:
        """Return how long the worker was busy; 0 if it did not come back."""
        begin_file, end_file = self.folder / "begun", self.folder / "over"
        return end_file.stat().st_mtime - begin_file.stat().st_mtime if end_file.exists() else 0.0

    @property
    def was_ended(self) -> bool:
        return any("it is ended" in line or "is gone" in line for _, line in self.lines)

    @property
    def is_well(self) -> bool:
        """Whether the run finished as if nothing had happened."""
        if self.code != 0:
            return False
        run = Run(folder=self.folder / "run", summary=summarize(self.folder / "run"))
        return run.used() == [Counter(range(SAMPLES))] * EPOCHS and not run.left

    @property
    def is_named(self) -> bool:
        """Whether a note has the line and the flag; a stopped or traced worker gives no line."""
        text = " ".join(line for _, line in self.notes)
        has_line = re.search(r"at train\.py:\d+ in \w+", text) is not None
        return bool(text) and (
            self.activity == "is debugged" or (has_line and "--stall-after" in text)
        )

    def row(self) -> list[str]:
        first_s, text = self.notes[0] if self.notes else (0.0, "-")
        text = re.sub(r"kill -(\w+) \d+", r"kill -\1 PID", text.removeprefix("note: "))
        return [
            self.place, self.activity, f"{self.busy_s:.0f}",
            f"{first_s:.0f}" if self.notes else "NO",
            text, str(len(self.notes)), "YES" if self.was_ended else "no",
            "yes" if self.is_well else "NO",
        ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--only", nargs="*", default=PLACES, choices=PLACES)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    machine_note = machine()
    with tempfile.TemporaryDirectory() as scratch:
        cases: list[Case] = []
        threads: list[threading.Thread] = []
        for place, activity in itertools.product(arguments.only, ACTIVITIES):
            folder = Path(scratch) / f"{len(cases)}"
            folder.mkdir()
            cases.append(Case(place=place, activity=activity, folder=folder))
            threads.append(threading.Thread(target=cases[-1].carry_out, args=[arguments.seconds]))
            threads[-1].start()
            time.sleep(LAUNCH_GAP_S)
        for thread in threads:
            thread.join()
        rows = [case.row() for case in cases]
        failures = [
            case for case in cases if case.was_ended or not (case.is_named and case.is_well)
        ]
        for case in failures:
            print(case.place, case.activity, case.code, *(line for _, line in case.lines), sep="\n")
    for row in rows:
        print(" | ".join(row))
    if arguments.write:
        title = f"Busy for {arguments.seconds:g} s: named, never ended"
        write_table("busy", title, HEADER, rows, f"{NOTE} {machine_note}.")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
