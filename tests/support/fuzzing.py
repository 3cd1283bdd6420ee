"""Damaged files and their readers: the only failures may be errors of Paceline.

    a sound folder -> one file damaged -> [ its checksums computed again ] -> the reader

The reader may refuse with a PacelineError, or load. What it loads must equal the original, unless
the checksums were recomputed, which hides the damage: then it must still be consistent. Everything
else is a fault: a traceback, a hang, a load that silently differs.
"""

import gzip
import hashlib
import io
import json
import random
import re
import shutil
import signal
import traceback
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.bench.throughput import ThroughputRow, merged, to_json
from paceline.checkpoints.folder import MANIFEST, _digest_of
from paceline.checkpoints.resumption import adopt, find, state_for
from paceline.config import resolve
from paceline.core.coordinator import Coordinator
from paceline.core.ledger import Ledger
from paceline.data.arrays import parse_idx
from paceline.data.catalogue import DataFile, read_checked
from paceline.errors import PacelineError
from paceline.events import (
    Apply,
    Discard,
    EpochEnd,
    Grant,
    Joined,
    Late,
    Lease,
    Pushed,
    Ticket,
)
from paceline.exports.subject import _load
from paceline.launch import launcher
from paceline.predict.profiles import read_profile
from paceline.program import TaskProgram
from paceline.protocols import parse
from paceline.replay import replay
from paceline.replica.seeding import random_states, restore_random_states
from paceline.report.files import draw_curve
from paceline.report.live import QuietObserver
from paceline.report.summary import Summary, summarize
from paceline.report.terminal import render_summary
from paceline.report.whereabouts import SampleReport, render_sample, report_sample
from paceline.script.member_state import MemberState, set_groups
from paceline.speed import Finding, Outcome, Speed
from paceline.system.files import OpenFolder
from paceline.trace import read_trace
from paceline.trace.records import Handed, Header, Ordered, Record
from paceline.tuning import remembered
from paceline.workloads.base import Task
from resealing import reseal
from tiny import BATCH_SIZE, NUM_SAMPLES, TASK

HANG_S = 20.0

# -- damage ---------------------------------------------------------------------------------------

Damage = Callable[[bytes, random.Random], bytes]


def flipped(data: bytes, rng: random.Random) -> bytes:
    """Flip a few bits."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


def cut(data: bytes, rng: random.Random) -> bytes:
    """Remove the end, or a piece in the middle."""
    start = rng.randrange(len(data))
    stop = len(data) if rng.random() < 0.5 else min(len(data), start + rng.randint(1, 64))
    return data[:start] + data[stop:]


def swapped(data: bytes, rng: random.Random) -> bytes:
    """Swap two pieces or two lines."""
    lines = data.splitlines(keepends=True)
    if len(lines) > 2 and rng.random() < 0.5:
        i, j = rng.sample(range(len(lines)), 2)
        lines[i], lines[j] = lines[j], lines[i]
        return b"".join(lines)
    size = rng.randint(1, max(1, len(data) // 4))
    i, j = sorted(rng.sample(range(max(2, len(data) - size)), 2))
    j = max(j, i + size)
    one, other = data[i : i + size], data[j : j + size]
    return data[:i] + other + data[i + size : j] + one + data[j + size :]


def enlarged(data: bytes, rng: random.Random) -> bytes:
    """Repeat a piece, or leave a hole."""
    at = rng.randrange(len(data) + 1)
    start = rng.randrange(len(data))
    more = data[start : start + rng.randint(1, 200)]
    if rng.random() < 0.5:
        more = rng.randbytes(rng.randint(1, 40))
    return data[:at] + more + data[at:]


_WORDS = (
    b"-1", b"0", b"1", b"1e999", b"-0.0", b"NaN", b"null", b"true", b'"x"', b"[]", b"{}", b"[[]]",
    b"9" * 19, b"9" * 400, b"0.5", b'""', b"7", b"1000000007", b"[1]", b'{"a":1}',
)  # fmt: skip
_TOKEN = re.compile(rb'-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?|"[^"\n]{0,80}"|true|false|null')


def reworded(data: bytes, rng: random.Random) -> bytes:
    """Change a number, a text or a constant, so that it stays JSON."""
    tokens = list(_TOKEN.finditer(data))
    if not tokens:
        return flipped(data, rng)
    one = rng.choice(tokens)
    word = rng.choice(_WORDS) if rng.random() < 0.7 else rng.choice(tokens)[0]
    return data[: one.start()] + word + data[one.end() :]


DAMAGES: tuple[Damage, ...] = (flipped, cut, swapped, enlarged, reworded, reworded)

# -- readers --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Reader:
    """A kind of file and its reader.

    Args:
        make: puts sound files into an empty folder.
        files: names of those that are damaged.
        read: loads from the folder; what it returns tells two loads apart.
        seal: recomputes the checksums after a file has changed, and returns whether it could.
            None: there are none.
        sound: what ``accepts`` is given of the sound files; None: what ``read`` makes of them.
        accepts: of a load whose checksum is wrong, given the sound one: whether it is right
            nevertheless (an older checkpoint, the beginning of a trace).
    """

    name: str
    make: Callable[[Path], None]
    files: tuple[str, ...]
    read: Callable[[Path], object]
    seal: Callable[[Path, str], bool] | None = None
    sound: Callable[[Path], object] | None = None
    accepts: Callable[[Any, Any], bool] = lambda found, sound: found == sound


@dataclass(slots=True)
class Tally:
    """The outcomes of the inputs of one reader."""

    tried: int = 0
    sealed: int = 0
    refused: int = 0
    loaded: int = 0
    faults: list[str] = field(default_factory=list)

    def add(self, other: "Tally") -> None:
        """Both together."""
        self.tried += other.tried
        self.sealed += other.sealed
        self.refused += other.refused
        self.loaded += other.loaded
        self.faults += other.faults


def attack(reader: Reader, folder: Path, num_inputs: int, seed: int) -> Tally:
    """Damage the files this often, half of the time with corrected checksums."""
    rng = random.Random(f"{reader.name}/{seed}")
    sound, work = folder / "sound", folder / "work"
    if not sound.exists():
        sound.mkdir(parents=True)
        reader.make(sound)
    _copy(sound, work)
    before = (reader.sound or reader.read)(work)
    tally = Tally()
    while tally.tried < num_inputs:
        _copy(sound, work)
        name, damage = rng.choice(reader.files), rng.choice(DAMAGES)
        whole = (work / name).read_bytes()
        (work / name).write_bytes(damage(whole, rng))
        if (work / name).read_bytes() == whole:
            continue
        seals = reader.seal is not None and 2 * tally.sealed <= tally.tried
        is_sealed = seals and reader.seal is not None and reader.seal(work, name)
        tally.tried += 1
        tally.sealed += is_sealed or reader.seal is None
        fault = _read(reader, work, None if is_sealed or reader.seal is None else before, tally)
        if fault:
            message = f"{reader.name}: {name} {damage.__name__}{', sealed' if is_sealed else ''}"
            tally.faults.append(f"{message}, input {tally.tried} of seed {seed}: {fault}")
    return tally


def _copy(sound: Path, work: Path) -> None:
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(sound, work, symlinks=True)


def _read(reader: Reader, work: Path, before: object, tally: Tally) -> str:
    """The error message; "" if nothing went wrong.

    Args:
        before: what the sound files hold, where a load must be right; None: it need not.
    """
    try:
        with limited():
            result = reader.read(work)
    except PacelineError as error:
        tally.refused += 1
        return "" if 0 < len(str(error)) < 2000 else "an error without words, or with too many"
    except Exception as error:  # any other exception is a finding
        last = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {error!s:.200} ({last.filename}:{last.lineno})"
    tally.loaded += 1
    is_right = before is None or reader.accepts(result, before)
    return "" if is_right else "loaded something else"


class Hang(Exception):
    """It took too long."""


@contextmanager
def limited() -> Iterator[None]:
    """End the block if it hangs."""

    def end(number: int, frame: object) -> None:
        raise Hang(f"still reading after {HANG_S:g} s")

    old = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, HANG_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


# -- settings -------------------------------------------------------------------------------------

_TOML = """workers = 4
protocol = "k-async:2"
batch_size = 256
lr = 0.05
seconds = 12.5
delay = ["exp:20ms", "1=10ms"]
slow = ["0=4x"]
respawn = true
seed = 7
checkpoint_every = "30s"
"""
_YAML = """workers: 4
protocol: k-async:2
batch_size: 256
lr: 0.05
delay: [exp:20ms, 1=10ms]
slow:
  - 0=4x
respawn: true
checkpoint_every: 30s
"""


def _make_settings(folder: Path) -> None:
    (folder / "paceline.toml").write_text(_TOML)
    (folder / "paceline.yaml").write_text(_YAML)


def _read_settings(folder: Path) -> object:
    return [
        repr(resolve({}, folder / name, {}).settings) for name in ("paceline.toml", "paceline.yaml")
    ]


# -- traces ---------------------------------------------------------------------------------------


def _run(folder: Path, task: Task | str = TASK, **given: Any) -> None:
    chosen = {
        "engine": "inline", "workers": 3, "device": "cpu", "threads": 1, "epochs": 2,
        "run_dir": str(folder), **given,
    }  # fmt: skip
    program = TaskProgram(task=task)
    launcher.launch_run(
        program, resolve(chosen, env={}, is_call=True).settings, QuietObserver(io.StringIO())
    )


def _make_trace(folder: Path) -> None:
    _run(folder / "run", protocol="k-sync:2", slow=("0=3x",), staleness="inverse")


def _read_all_of_trace(folder: Path) -> object:
    run = folder / "run"
    records = list(read_trace(run / "trace.jsonl"))
    summary = summarize(run)
    render_summary(summary)
    draw_curve(summary)
    json.dumps(summary.to_json(), allow_nan=False)
    sample = report_sample(run, 7, lambda header, epoch, size: range(NUM_SAMPLES))
    render_sample(sample)
    _check_sums(records, summary, sample)
    read_profile(run)
    return [repr(record) for record in records]


def _check_sums(records: list[Record], summary: Summary, sample: SampleReport) -> None:
    """The figures of a report equal the sums of its lines, counted here again."""
    pushes = [record.fact for record in records if isinstance(record, Handed)]
    orders = [record.order for record in records if isinstance(record, Ordered)]
    updates = [order for order in orders if isinstance(order, Apply)]
    in_updates = sum(len(update.tickets) for update in updates)
    of_ticket = {push.ticket[:2]: push.num_samples for push in pushes}
    assert summary.updates == len(updates)
    assert sum(one.pushes for one in summary.per_worker) == len(pushes) >= in_updates
    assert sum(one.samples for one in summary.per_worker) == sum(
        push.num_samples for push in pushes
    )
    assert summary.samples == sum(of_ticket[two[:2]] for one in updates for two in one.tickets)
    assert summary.late_pushes + summary.discarded_pushes == sum(
        isinstance(order, Late | Discard) for order in orders
    )
    stale = summary.staleness_versions
    assert 0 <= stale.p50 <= stale.p99 <= stale.max <= max(0, len(updates) - 1)
    (num_samples,) = {
        record.number("num_samples") for record in records if isinstance(record, Header)
    }
    for one in sample.ledgers:
        assert one.used + one.dropped + one.open == one.samples == num_samples
        assert min(one.used, one.dropped, one.open) >= 0
        assert 0 <= one.twice <= one.used


def _make_replayable(folder: Path) -> None:
    _run(folder / "run", "quadratic", protocol="k-async:2", slow=("0=3x",), updates=20)


def _replay(folder: Path) -> object:
    return replay(folder / "run").difference


def _is_equal_so_far(difference: str, sound: str) -> bool:
    """No difference, or only that the trace ends in the middle of a decision."""
    return difference == sound == "" or difference.endswith("the run decided nothing")


def _seal_trace(folder: Path, name: str) -> bool:
    """Complete lines get new checksums; what is no text stays unchanged."""
    path = folder / name
    with suppress(UnicodeDecodeError):
        path.write_text(reseal(path.read_bytes().decode()))
        return True
    return False


def _is_beginning(found: list[str], sound: list[str]) -> bool:
    return found == sound[: len(found)]


# -- checkpoints ----------------------------------------------------------------------------------

_NEWEST = "run/checkpoints/2"
_PARTS = (
    "run.json", "coordinator.json", "layout.json", "model.safetensors", "optimizer.safetensors",
    "worker-0.json", "worker-0.safetensors",
)  # fmt: skip


def _make_checkpoint(folder: Path) -> None:
    run = folder / "run"
    _run(run, protocol="k-async:2", checkpoint_every="4 updates", updates=8)
    checkpoints = run / "checkpoints"
    numbers = sorted(int(path.name) for path in checkpoints.iterdir() if path.name.isdigit())
    for was, now in zip(numbers[-2:], (1, 2), strict=True):
        (checkpoints / str(was)).rename(checkpoints / f"{now}")
    (checkpoints / "latest").write_text(json.dumps({"checkpoint": 2}))


def _make_only_checkpoint(folder: Path) -> None:
    """There is no older one to fall back on."""
    _make_checkpoint(folder)
    shutil.rmtree(folder / "run/checkpoints/1")


def _seal_checkpoint(folder: Path, name: str) -> bool:
    """Make the manifest match the present files."""
    place = folder / _NEWEST
    if not name.startswith(_NEWEST):
        return False
    try:
        body = json.loads((place / MANIFEST).read_text())
        if name.endswith(MANIFEST):
            body.pop("sha256", None)
        else:
            body = {"format": body["format"], "files": body["files"]}
            part = place / Path(name).name
            body["files"][part.name] = {
                "sha256": hashlib.sha256(part.read_bytes()).hexdigest(),
                "bytes": part.stat().st_size,
            }
        (place / MANIFEST).write_text(json.dumps({**body, "sha256": _digest_of(body)}))
    except (ValueError, AttributeError, TypeError):
        return False  # the manifest itself was damaged beyond reading
    return True


def _read_checkpoint(folder: Path) -> object:
    """Read it as a resumed run does: settings, coordinator, model, optimizer, random states."""
    run = folder / "run"
    settings = adopt(resolve({"resume": str(run)}, env={}, is_call=True))
    result = find(settings)
    assert result is not None
    protocol = parse(settings.protocol, settings.workers)
    ledger = Ledger(NUM_SAMPLES, settings.batch_size or BATCH_SIZE, protocol.num_pushes)
    result.refuse_another(result.saved["identity"])
    state = state_for(result, ledger, protocol)
    coordinator = Coordinator(protocol, ledger)
    coordinator.resume(state)
    _finish_epoch(coordinator, result.first_member)
    own = _load_own(result.checkpoint.path)
    return result.version, repr(state), own


def _finish_epoch(coordinator: Coordinator, first_member: int) -> None:
    """Each sample of the current epoch is used exactly once, before or after."""
    ledger, used = coordinator._ledger, [0] * NUM_SAMPLES
    cuts = ledger._cuts
    for lease, fate in zip(cuts.leases, ledger._fate, strict=False):
        if fate > 0:
            for position in range(lease.start, lease.stop):
                used[position] += 1
    is_cut_off = coordinator.is_cut_off
    orders = list(coordinator.hear(Joined(first_member, 0.0)))
    if not is_cut_off:
        return
    orders += coordinator.open_epoch(0.0, None)
    held: dict[Ticket, tuple[Lease, ...]] = {}
    for turn in range(10 * NUM_SAMPLES):
        for order in orders:
            if isinstance(order, Grant):
                held[order.ticket] = order.leases
            elif isinstance(order, Apply):
                for ticket in order.tickets:
                    for lease in held.pop(ticket):
                        for position in range(lease.start, lease.stop):
                            used[position] += 1
            elif isinstance(order, EpochEnd):
                assert set(used) == {1}, "a sample is lost, or used twice"
                return
        ticket = next(one for one in held if not ledger.is_gathered(one))
        samples = sum(lease.num_samples for lease in held[ticket])
        orders = coordinator.hear(Pushed(ticket, samples, 1.0, True, float(turn)))
    raise AssertionError("the epoch does not end")


def _load_own(place: Path) -> str:
    """Model, optimizer and worker state, as a resumed member loads them."""
    torch.manual_seed(3)
    model = TASK.model()
    optimizer = TASK.optimizer(model.parameters(), TASK.learning_rate)
    keeper = MemberState(None, place, 0)
    keeper.load(model, optimizer)
    states = random_states()
    keeper.add("groups", list, lambda rows: set_groups(optimizer, rows))
    keeper.add("random", random_states, restore_random_states)
    restore_random_states(states)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return hashlib.sha256(
        b"".join(one.detach().numpy().tobytes() for one in model.parameters())
    ).hexdigest()


def _resume(folder: Path) -> object:
    """Resume the run to its end."""
    chosen = {"resume": str(folder / "run"), "updates": 100, "checkpoint_every": "never"}
    settings = adopt(resolve(chosen, env={}, is_call=True))
    summary = launcher.launch_run(TaskProgram(task=TASK), settings, QuietObserver(io.StringIO()))
    assert isinstance(summary, Summary)
    result = report_sample(Path(summary.run_dir), 7, lambda header, epoch, size: range(NUM_SAMPLES))
    for one in result.ledgers:
        assert (one.used, one.dropped, one.open, one.twice) == (one.samples, 0, 0, 0), one
    return summary.updates, summary.final_loss


def _read_both(folder: Path) -> list[object]:
    """The results of the newest checkpoint and of the one before."""
    newest = _read_checkpoint(folder)
    shutil.rmtree(folder / _NEWEST)
    return [newest, _read_checkpoint(folder)]


def _is_one_of(found: object, sound: list[object]) -> bool:
    return found in sound


# -- data -----------------------------------------------------------------------------------------

_IDX = b"\0\0\x08\x03" + b"".join(n.to_bytes(4, "big") for n in (6, 5, 4)) + bytes(range(120))


def _make_data(folder: Path) -> None:
    (folder / "images").write_bytes(_IDX)
    (folder / "images.gz").write_bytes(gzip.compress(_IDX, mtime=0))
    _seal_data(folder, "images")


def _seal_data(folder: Path, name: str) -> bool:
    content = (folder / name).read_bytes()
    if name.endswith(".gz"):
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error):  # it is no longer gzip
            return False
    rows = {} if not (folder / "sums").exists() else json.loads((folder / "sums").read_text())
    for one in (name,) if rows else ("images", "images.gz"):
        rows[one] = [hashlib.md5(content).hexdigest(), len(content)]
    (folder / "sums").write_text(json.dumps(rows))
    return True


def _read_data(folder: Path) -> object:
    results = []
    for name, (md5, size) in json.loads((folder / "sums").read_text()).items():
        file = DataFile(name=name, md5=md5, num_bytes=size)
        results.append(parse_idx(read_checked(folder / name, file, "try again"), name).tolist())
    return results


# -- stored measurements --------------------------------------------------------------------------

_ROWS = [
    ThroughputRow(machine="here", device="cpu", model="lenet", precision="fp32", batch_size=size,
        images_per_s=100.0 * size, least_per_s=90.0, most_per_s=110.0, peak_bytes=1 << 20)
    for size in (1, 8, 64)
]  # fmt: skip
_OUTCOME = Outcome(
    speed=Speed(compile="default"),
    findings=(Finding(name="compile", what="compile default", gain=1.2, is_kept=True),),
    before_s=0.03, after_s=0.02, num_samples=256, batch_size=256, took_s=12.0,
)  # fmt: skip


def _make_measured(folder: Path) -> None:
    (folder / "table.json").write_text(json.dumps(to_json(_ROWS)))
    (folder / "trial.json").write_text(json.dumps(asdict(_OUTCOME)))


def _read_measured(folder: Path) -> object:
    rows = merged([folder / "table.json"], [])
    with closing(OpenFolder.open(folder)) as place:
        outcome = remembered._read(place, "trial.json")
    return [repr(row) for row in rows], None if outcome is None else outcome.lines()


# -- models ---------------------------------------------------------------------------------------


def _model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(3, 2)


def _make_model(folder: Path) -> None:
    from safetensors.torch import save_file

    save_file(_model().state_dict(), folder / "model.safetensors")


def _read_model(folder: Path) -> object:
    model = _model()
    _load(model, "linear", folder)
    return [parameter.tolist() for parameter in model.parameters()]


READERS = (
    Reader(name="settings", make=_make_settings, files=("paceline.toml", "paceline.yaml"),
           read=_read_settings),
    Reader(name="trace", make=_make_trace, files=("run/trace.jsonl",), read=_read_all_of_trace,
           seal=_seal_trace, accepts=_is_beginning),
    Reader(name="checkpoint", make=_make_checkpoint, read=_read_checkpoint, seal=_seal_checkpoint,
           files=(*(f"{_NEWEST}/{one}" for one in (*_PARTS, MANIFEST)), "run/checkpoints/latest"),
           sound=_read_both, accepts=_is_one_of),
    Reader(name="ledger", make=_make_only_checkpoint, read=_read_checkpoint, seal=_seal_checkpoint,
           files=(f"{_NEWEST}/coordinator.json",)),
    Reader(name="resume", make=_make_only_checkpoint, read=_resume, seal=_seal_checkpoint,
           files=tuple(f"{_NEWEST}/{one}" for one in _PARTS)),
    Reader(name="replay", make=_make_replayable, files=("run/trace.jsonl",), read=_replay,
           seal=_seal_trace, accepts=_is_equal_so_far),
    Reader(name="data", make=_make_data, files=("images", "images.gz"), read=_read_data,
           seal=_seal_data),
    Reader(name="measurements", make=_make_measured, files=("table.json", "trial.json"),
           read=_read_measured),
    Reader(name="model", make=_make_model, files=("model.safetensors",), read=_read_model),
)  # fmt: skip
