"""Hostile folders, files and settings, and how runs and reports handle them.

    python tests/support/planting.py --tries 20 --races 6     one JSON object on standard output

    seed -> verb, place, what is planted there, by whom -> a process -> judged

A try is good where no decoy changed (content, mode, owner, names), no planted pickle ran, nothing
said Traceback, and it ended within 5 s of what the verb takes undisturbed. A race is two processes
that begin at once in one folder: one goes on, the other says one sentence. Processes are forked
from this one, which has imported torch, so that a try takes less than a second. Planted things
belong to the same user, or, where root runs this, to a second one without rights, who also
exchanges folders meanwhile.
"""

import argparse
import json
import os
import pickle
import random
import shutil
import signal
import stat
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from paceline.cli import app
from paceline.engines import inline  # noqa: F401
from paceline.errors import ConfigError
from paceline.replay import replay as make_again  # noqa: F401
from paceline.script import worker  # noqa: F401  before the fork, once for all
from paceline.trace import read_trace

NOBODY = 65534
SPARE_S = 20.0
PLAIN = "--device cpu --threads 1"
SHORT = f"{PLAIN} --batch-size 16"
NAMES = (
    "trace.jsonl", "logs", "logs/worker-0.log", "metrics.csv", "summary.json", "curve.svg", "lock",
    "model.safetensors", "checkpoints", "checkpoints/latest", "checkpoints/.new-2",
    "checkpoints/1/run.json", "checkpoints/1/coordinator.json", "checkpoints/1/manifest.json",
    "checkpoints/1/model.safetensors", "checkpoints/1/worker-0.json", "program.pkl", "tensorboard",
)  # fmt: skip
VERBS = {
    "train": f"train quadratic --engine inline --updates 4 --log csv --run-dir run {SHORT}",
    "launch": f"launch --engine inline --run-dir run {PLAIN} train.py",
    "resume": f"train quadratic --resume run --updates 8 --log csv {SHORT}",
    "auto": f"train quadratic --engine inline --updates 8 --resume auto --run-dir run {SHORT}",
    "report": "report run",
    "replay": "replay run",
    "config": "config show",
    "data": "data",
    "workers": f"train quadratic --workers 2 --updates 4 --run-dir run {SHORT}",
}
SCRIPT = """
import paceline, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pace = paceline.connect()
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.ones(8, 4), torch.ones(8, 1)), batch_size=4)
model, optimizer, loader = pace.prepare(model, optimizer, loader)
for epoch in pace.epochs(2):
    for inputs, targets in loader:
        with pace.step():
            optimizer.zero_grad()
            ((model(inputs) - targets) ** 2).mean().backward()
            optimizer.step()
pace.save()
"""
ALIASES = "slow: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{now}: &{now} [{','.join(['*' + before] * 9)}]\n"
    for before, now in zip("abcdefgh", "bcdefghi", strict=True)
)
SETTINGS = {
    "paceline.yaml": (ALIASES, "[" * 100_000, "workers: 1000000", "lr: .inf", "name: \"a\\0b\"",
                      "updates: 0x" + "f" * 5000, f"name: {'x' * 300}"),
    "paceline.toml": ("workers = 1000000", "seed = " + "9" * 400, "x = " + "[" * 100_000,
                      "run_dir = '/proc/1/root'", "name = 'latest'"),
}  # fmt: skip


@dataclass(kw_only=True)
class Result:
    """The outcome of many tries."""

    tries: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    races: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    longest_s: float = 0.0
    second_user: int = 0
    left_out: int = 0


class Marks:
    """Unpickling this makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self._path),)


class Scene:
    """One try's folders: ``work``, where the command runs, and decoys beside it."""

    def __init__(self, folder: Path) -> None:
        self.work = folder / "work"
        self.decoys = self.work / "decoys"
        self.marker = folder / "marker"
        (self.decoys / "within").mkdir(parents=True)
        for name in ("file", "trace.jsonl", "summary.json", "metrics.csv", "within/file"):
            (self.decoys / name).write_text(f"decoy {name}\n")
            (self.decoys / name).chmod(0o640)
        self.pickle = pickle.dumps(Marks(self.marker))
        self._was = self._look()

    @property
    def is_whole(self) -> bool:
        return self._look() == self._was

    def _look(self) -> list[tuple[object, ...]]:
        rows: list[tuple[object, ...]] = []
        for one in (self.decoys, *sorted(self.decoys.rglob("*"))):
            now = one.lstat()
            content = one.read_bytes() if stat.S_ISREG(now.st_mode) else b""
            rows.append((str(one), now.st_mode, now.st_uid, now.st_gid, content))
        return rows


# -- planting --------------------------------------------------------------------------------------

Plant = Callable[[Scene, Path, random.Random], object]


def _damage(scene: Scene, path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes() if path.is_file() else b"{}")
    for _ in range(rng.randint(1, 9)):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    _make(path).write_bytes(data)


def _cut(scene: Scene, path: Path, rng: random.Random) -> None:
    data = path.read_bytes() if path.is_file() else b"{}"
    _make(path).write_bytes(data[: rng.randrange(len(data) + 1)])


def _grow(scene: Scene, path: Path, rng: random.Random) -> None:
    """A sparse terabyte of zeros, a line without end."""
    with (path if path.is_file() else _make(path)).open("ab") as file:
        file.truncate(1 << 40)


def _make(path: Path) -> Path:
    """Make room for a file of this name."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


PLANTS: dict[str, Plant] = {
    "link to a file": lambda scene, path, rng: _make(path).symlink_to(scene.decoys / "file"),
    "link to a folder": lambda scene, path, rng: _make(path).symlink_to(scene.decoys / "within"),
    "link to no file": lambda scene, path, rng: _make(path).symlink_to(scene.decoys / "new"),
    "hard link": lambda scene, path, rng: _make(path).hardlink_to(scene.decoys / "file"),
    "pipe": lambda scene, path, rng: os.mkfifo(_make(path)),
    "folder": lambda scene, path, rng: _make(path).mkdir(),
    "file": lambda scene, path, rng: _make(path).touch(),
    "pickle": lambda scene, path, rng: _make(path).write_bytes(scene.pickle) and None,
    "damaged": _damage,
    "cut off": _cut,
    "endless": _grow,
}


def plant(scene: Scene, verb: str, rng: random.Random) -> tuple[str, Path | None]:
    """Prepare something for this verb; return what and where."""
    if verb == "config" or rng.random() < 0.08:
        name = rng.choice(list(SETTINGS))
        (scene.work / name).write_text(rng.choice(SETTINGS[name]))
        return "settings", None
    if verb == "data":
        cache = scene.work / "cache" / "paceline" / "data" / "mnist"
        path = cache / "train-images-idx3-ubyte" if rng.random() < 0.7 else cache
    else:
        path = scene.work / "run" / rng.choice(NAMES)
        _make_run_folder(scene)
    # Of these the first walk through a terabyte would take its time, honestly.
    kinds = [kind for kind in PLANTS if kind != "endless" or path.name.endswith((".json", "jsonl"))]
    kind = rng.choice(kinds)
    PLANTS[kind](scene, path, rng)
    return kind, path


def _make_run_folder(scene: Scene) -> None:
    (scene.work / "run").mkdir(exist_ok=True)
    (scene.work / "run" / "program.pkl").write_bytes(scene.pickle)


# -- a process -------------------------------------------------------------------------------------


def begin(scene: Scene, line: str, said: Path, after: int = -1) -> int:
    """Fork a process that runs this command; return its pid. ``after``: when this pipe closes."""
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        os.setpgid(0, 0)
        if after >= 0:
            os.read(after, 1)
        os.chdir(scene.work)
        os.environ["XDG_CACHE_HOME"] = str(scene.work / "cache")
        descriptor = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        code = app.run(line.split())
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def finish(pid: int, within_s: float) -> int | None:
    """Return its exit code; None: it had to be killed."""
    end_s = time.monotonic() + within_s
    while time.monotonic() < end_s:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def exchange(scene: Scene) -> int:
    """The second user's process: repeatedly exchanges the run's folder for the decoys."""
    pid = os.fork()
    if pid:
        return pid
    run, away, decoys = scene.work / "run", scene.work / "away", scene.decoys
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    going = True

    def stop(*_: object) -> None:
        nonlocal going
        going = False

    signal.signal(signal.SIGTERM, stop)
    while going and not (run / "trace.jsonl").exists():
        time.sleep(0.0005)
    while going:
        try:
            run.rename(away)
            decoys.rename(run)
            time.sleep(0.0005)
            run.rename(decoys)
            away.rename(run)
        except OSError:
            break
        time.sleep(0.0005)
    os._exit(0)


# -- tries -----------------------------------------------------------------------------------------


class Tries:
    """Tries of one seed after another, on copies of one run."""

    def __init__(self, folder: Path, result: Result, verbs: Sequence[str]) -> None:
        self._folder = folder
        self._result = result
        scene = Scene(folder / "pattern")
        (scene.work / "train.py").write_text(SCRIPT)
        self.usual_s: dict[str, float] = {}
        order = ("train", "resume", "report", "replay", "launch", "config", "data", "workers")
        for verb in (one for one in order if one in {*verbs, "train", "resume"}):
            if verb in ("launch", "workers"):
                shutil.rmtree(scene.work / "run")
            before_s = time.monotonic()
            code = finish(begin(scene, VERBS[verb], folder / "said"), 60)
            assert code == 0, (verb, code, (folder / "said").read_text()[-3000:])
            self.usual_s[verb] = time.monotonic() - before_s
            if verb == "resume":
                shutil.copytree(scene.work / "run", folder / "whole")
        self.usual_s["auto"] = self.usual_s["train"]

    def attempt(self, seed: int, verbs: Sequence[str]) -> None:
        """One try; its failures go to the faults."""
        rng, result = random.Random(seed), self._result
        place = self._folder / f"try-{seed}"
        scene, verb = Scene(place), rng.choice(verbs)
        (scene.work / "train.py").write_text(SCRIPT)
        if verb in ("resume", "auto", "report", "replay"):
            shutil.copytree(self._folder / "whole", scene.work / "run")
        may_be_second = os.geteuid() == 0
        is_exchange = verb in ("train", "resume", "workers") and rng.random() < 0.2
        swapper = 0
        if is_exchange and not may_be_second:
            result.left_out += 1
            is_exchange = False
        if is_exchange:
            what = "exchanged meanwhile"
            os.chown(scene.work, NOBODY, NOBODY)
            swapper = exchange(scene)
        else:
            what, path = plant(scene, verb, rng)
            may_be_given = may_be_second and path is not None and what != "hard link"
            if may_be_given and path is not None and rng.random() < 0.4:
                what += " of a second user"
                os.chown(path if rng.random() < 0.7 else path.parent, NOBODY, NOBODY,
                         follow_symlinks=False)  # fmt: skip
        result.second_user += "second user" in what or is_exchange
        output_file = place / "said"
        before_s = time.monotonic()
        code = finish(begin(scene, VERBS[verb], output_file), self.usual_s[verb] + SPARE_S)
        took_s = time.monotonic() - before_s
        if swapper:
            os.kill(swapper, signal.SIGTERM)
            os.waitpid(swapper, 0)
        self._judge(f"seed {seed}: {verb}, {what}", scene, code, output_file)
        kind = what.removesuffix(" of a second user")
        result.tries[kind] += 1
        result.refused[kind] += code not in (0, None)
        result.longest_s = max(result.longest_s, took_s - self.usual_s[verb])
        shutil.rmtree(place)

    def race(self, seed: int) -> None:
        """Two processes at once in one folder."""
        rng, result = random.Random(seed), self._result
        place = self._folder / f"race-{seed}"
        scene = Scene(place)
        kind = rng.choice(("two runs", "two names", "two resumes", "a run and a resume"))
        long = f"train quadratic --seconds 0.6 --epochs 1000000 --checkpoint-every 5s {SHORT}"
        lines = {
            "two runs": [f"{long} --engine inline --run-dir run"] * 2,
            "two names": [f"{long} --engine inline --name run"] * 2,
            "two resumes": [f"{long} --resume run"] * 2,
            "a run and a resume": [f"{long} --engine inline --run-dir run --resume auto",
                                   f"{long} --resume run"],
        }[kind]  # fmt: skip
        if "resume" in kind:
            shutil.copytree(self._folder / "whole", scene.work / "run")
        ready, go = os.pipe()
        pids = [begin(scene, line, place / f"said-{i}", ready) for i, line in enumerate(lines)]
        # Children hold this end, too: a byte each releases them.
        os.write(go, b"12")
        codes = [finish(pid, 20) for pid in pids]
        os.close(ready)
        os.close(go)
        result.races[kind] += 1
        texts = [(place / f"said-{i}").read_text() for i in range(2)]
        errors = [line for text in texts for line in text.splitlines() if "error: " in line]
        folder = scene.work / ("runs/run" if kind == "two names" else "run")
        try:
            num_lines = sum(1 for _ in read_trace(folder / "trace.jsonl"))
        except ConfigError as error:
            result.faults.append(f"race {seed}: {kind}: {error}")
            num_lines = 1
        if sorted(map(str, codes)) != ["0", "2"] or len(errors) != 1 or num_lines < 1:
            result.faults.append(f"race {seed}: {kind}: {codes} {errors}")
        if any("Traceback" in text for text in texts):
            result.faults.append(f"race {seed}: {kind}: Traceback")
        shutil.rmtree(place)

    def _judge(self, what: str, scene: Scene, code: int | None, said: Path) -> None:
        text = said.read_text(errors="replace") if said.exists() else ""
        faults = []
        if code is None:
            faults.append("it hung")
        elif code not in (0, 1, 2):
            faults.append(f"exit {code}")
        if "Traceback" in text:
            faults.append("Traceback: " + text.strip().splitlines()[-1][:200])
        if not scene.is_whole:
            faults.append("a decoy changed")
        if scene.marker.exists():
            faults.append("a planted pickle ran")
        self._result.faults += [f"{what}: {fault}" for fault in faults]


def run_all(num_tries: int, num_races: int, seed: int, verbs: Sequence[str]) -> Result:
    """Run this number of tries and races, one after another."""
    torch.set_num_threads(1)
    result = Result()
    with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
        Path(folder).chmod(0o755)
        tries = Tries(Path(folder), result, verbs)
        for number in range(num_tries):
            tries.attempt(seed + number, verbs)
        for number in range(num_races):
            tries.race(seed + number)
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tries", type=int, default=20)
    parser.add_argument("--races", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verbs", nargs="+", default=list(VERBS), choices=list(VERBS))
    asked = parser.parse_args()
    print(json.dumps(vars(run_all(asked.tries, asked.races, asked.seed, asked.verbs))))


if __name__ == "__main__":
    main()
