"""Carry out a plan: run the command in its own process, strike it, and resume it to its end.

    launch -> strikes -> its end ---- exit 0 ---------------------------> Outcome
                            `---- else --> launch with --resume auto -----^

A run that was ended by its faults is launched again without faults. A stopped launcher is continued
after a while, since nothing else would do so. Remains of a run are searched for three seconds:
processes by their environment, files in a temporary folder of its own. This module must not know
what is right.
"""

import contextlib
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from havoc_plan import Plan, Strike

SCRIPT = Path(__file__).parent / "counted.py"
LIMIT_S, LEAVE_S, STOPPED_S, LOOK_S = 60.0, 3.0, 1.5, 0.003
CALM = "HAVOC_IS_OVER"
"""Environment variable of processes that shall no longer strike themselves."""
WAIT_S, AWAITED = 15.0, "nobody is left to go on without it"
"""After reporting this, a run would wait forever for a stopped process, so it is told to end."""
_MODULES = {
    "forkserver": b"paceline.engines.local.forkserver",
    "writer": b"paceline.checkpoints.writer",
}
_TO_END = ("TERM", "INT", "HUP")


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One call of the command.

    Attributes:
        code: its exit code; None: it did not end within the limit.
        screen: what it printed.
        asked_s: from the first TERM or INT that it heard to its end; 0: it heard none.
        left: remains three seconds after its end.
    """

    code: int | None
    screen: str
    took_s: float
    asked_s: float
    left: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of a plan.

    Attributes:
        run: the run's folder.
        struck: the number of each strike that happened, and where it hit.
        finals: the weights of each worker that finished its script in the last launch.
        unfinished: checkpoints that were being written when the first launch ended.
        is_anew: whether there was none to resume from, and the second launch began again.
    """

    run: Path
    launches: tuple[Launch, ...]
    struck: dict[int, str]
    finals: tuple[Path, ...]
    unfinished: int = 0
    is_anew: bool = False


def carry_out(plan: Plan, folder: Path, limit_s: float = LIMIT_S) -> Outcome:
    """Carry out the plan."""
    launches = [_launch(plan, folder, plan.strikes, limit_s)]
    unfinished = len(list((folder / "run" / "checkpoints").glob(".new-*")))
    if launches[0].code not in (0, None):
        for final in folder.glob("final-*.pt"):
            final.unlink()
        if not list((folder / "run" / "checkpoints").glob("[0-9]*")) and (folder / "run").exists():
            (folder / "run").rename(folder / "first-run")
        launches.append(_launch(plan, folder, (), limit_s))
    marks = sorted(folder.glob("struck-*"))
    return Outcome(
        run=folder / "run",
        launches=tuple(launches),
        struck={int(one.name.rpartition("-")[2]): one.read_text() for one in marks},
        finals=tuple(sorted(folder.glob("final-*.pt"))),
        unfinished=unfinished,
        is_anew=(folder / "first-run").exists(),
    )


def command(plan: Plan, folder: Path, *, resumes: bool) -> list[str]:
    """The command line of a plan."""
    return [
        sys.executable, "-m", "paceline", "launch", "--workers", str(plan.workers),
        "--protocol", plan.protocol, "--path", plan.path, "--device", "cpu", "--threads", "1",
        "--checkpoint-every", plan.every, "--run-dir", str(folder / "run"),
        *["--respawn"] * plan.respawn, *["--resume", "auto"] * resumes,
        str(SCRIPT), plan.write(), str(folder),
    ]  # fmt: skip


def _launch(plan: Plan, folder: Path, strikes: tuple[Strike, ...], limit_s: float) -> Launch:
    resumes = not strikes
    name = "resumed" if resumes else "struck"
    own, scratch = folder / f"cwd-{name}", Path(tempfile.mkdtemp(prefix="havoc-"))
    own.mkdir()  # this folder needs a short name: loader workers create sockets in it
    caches = folder / "caches"  # torch's own cache, shared by all runs of a user
    environment = {
        **os.environ, "TMPDIR": str(scratch), "TORCHINDUCTOR_CACHE_DIR": str(caches),
        "PYTHONFAULTHANDLER": "1", **({CALM: "1"} if resumes else {}),
    }  # fmt: skip
    screen = folder / f"screen-{name}"
    with screen.open("wb") as output:
        process = subprocess.Popen(
            command(plan, folder, resumes=resumes), cwd=own, stdout=output, stderr=output,
            stdin=subprocess.DEVNULL, env=environment, start_new_session=True,
            preexec_fn=_hear_hup,
        )  # fmt: skip
    start_s = time.monotonic()
    striker = Striker(strikes, folder, process.pid)
    while process.poll() is None and time.monotonic() - start_s < limit_s:
        striker.look()
        if time.monotonic() - start_s > WAIT_S and AWAITED in screen.read_text(errors="replace"):
            striker.end_it()
        time.sleep(LOOK_S)
    end_s = time.monotonic()
    code = process.poll()
    if code is None:
        _say_where(process, scratch)
    left = left_behind(scratch, own)
    shutil.rmtree(scratch, ignore_errors=True)
    return Launch(
        code=code, screen=screen.read_text(errors="replace"), took_s=end_s - start_s,
        asked_s=max(0.0, end_s - striker.asked_at_s), left=left if code is not None else (),
    )  # fmt: skip


def _hear_hup() -> None:
    """Restore the handler of SIGHUP, which a run under nohup would inherit ignored."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


# -- strikes --------------------------------------------------------------------------------------


class Striker:
    """Carries out the strikes by cue, from outside.

    Attributes:
        asked_at_s: time of the first TERM or INT to the launcher.
    """

    def __init__(self, strikes: tuple[Strike, ...], folder: Path, launcher: int) -> None:
        self._waiting = {i: one for i, one in enumerate(strikes) if not one.line}
        self._folder = folder
        self._launcher = launcher
        self._cued = {}  # type: dict[int, float]
        self._start_s = time.monotonic()
        self._goes_on_s = 0.0
        self.asked_at_s = float("inf")

    def look(self) -> None:
        """Carry out the strikes that are due."""
        now_s = time.monotonic()
        if self._goes_on_s and now_s >= self._goes_on_s:
            self._goes_on_s = 0.0
            self._send(self._launcher, "CONT")
        for number, one in list(self._waiting.items()):
            if number not in self._cued and self._is_cued(one):
                self._cued[number] = self._start_s if one.cue == "start" else now_s
            due_s = self._cued.get(number, float("inf")) + one.after_s
            if now_s >= due_s and (pid := self._find(one)) and self._send(pid, one.signal):
                del self._waiting[number]
                mark = f"{one.after_s:.3f} s after {one.cue} of worker {one.witness}"
                (self._folder / f"struck-{number}").write_text(mark)
                if one.target == "launcher":
                    self._note(one.signal, now_s)

    def end_it(self) -> None:
        """Once."""
        if self.asked_at_s == float("inf"):
            self._send(self._launcher, "TERM")
            self._note("TERM", time.monotonic())

    def _note(self, name: str, now_s: float) -> None:
        if name == "STOP":
            self._goes_on_s = now_s + STOPPED_S
        if name in _TO_END:  # a stopped process gets it when continued
            self.asked_at_s = min(self.asked_at_s, max(now_s, self._goes_on_s))

    def _is_cued(self, one: Strike) -> bool:
        cue, _, least = one.cue.partition(" ")
        if cue == "checkpoint":
            unfinished = (self._folder / "run" / "checkpoints").glob(".new-*")
            return any(int(path.name[5:]) >= int(least or 1) for path in unfinished)
        return one.cue == "start" or (self._folder / f"cue-{one.witness}-{one.cue}").exists()

    def _find(self, one: Strike) -> int:
        """The current process of the target; 0: there is none (yet, or any more)."""
        if one.kind == "launcher":
            return self._launcher
        if one.kind == "worker":
            with contextlib.suppress(OSError, ValueError):
                return int((self._folder / f"pid-{one.target.split()[1]}").read_text())
            return 0
        with contextlib.suppress(OSError):
            tasks = Path(f"/proc/{self._launcher}/task").iterdir()
            children = [pid for task in tasks for pid in (task / "children").read_text().split()]
            for pid in children:
                if _MODULES[one.kind] in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return int(pid)
        return 0

    def _send(self, pid: int, name: str) -> bool:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.Signals[f"SIG{name}"])
            return True
        return False


# -- remains --------------------------------------------------------------------------------------


def left_behind(scratch: Path, *own: Path) -> tuple[str, ...]:
    """Processes of a run, its temporary files, and files it wrote to the current folder.

    Processes are known by the temporary folder in their environment, whoever their parent is now;
    memory and sockets without a name are gone with them, and sockets with one are files.
    Two kinds that whoever is killed at the moment leaves are not counted: the ten empty files that
    torch opens where a loader's worker is gone, to see whether it may (`_try_get_data` in
    torch/utils/data/dataloader.py), and the file of four bytes by which Python looks for a folder
    where it can write (`tempfile._get_default_tempdir`).
    """
    end_s = time.monotonic() + LEAVE_S
    while True:
        files = [one for folder in (scratch, *own) for one in folder.iterdir()]
        files = [one for one in files if not _is_a_try(one)]
        left = [*_alive(scratch), *(f"file {one.parent.name}/{one.name}" for one in files)]
        if not left or time.monotonic() > end_s:
            break
        time.sleep(0.02)
    for pid in _alive(scratch):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return tuple(f"process {one}" if isinstance(one, int) else str(one) for one in left)


def _is_a_try(path: Path) -> bool:
    with contextlib.suppress(OSError):  # it has just gone
        if not stat.S_ISREG(path.lstat().st_mode):
            return False
        word = path.read_bytes()[:5]
        return (word == b"" and path.name.startswith("tmp")) or word == b"blat"
    return True


def _alive(scratch: Path) -> list[int]:
    """Processes whose temporary folder it is; what is over, and only not reaped, has none."""
    mark, pids = f"TMPDIR={scratch}\0".encode(), []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (place / "environ").read_bytes():
                pids.append(int(place.name))
    return pids


def _parent(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def _say_where(process: "subprocess.Popen[bytes]", scratch: Path) -> None:
    """Let workers and launcher of a hanging run write their stacks, then end it."""
    pids = _alive(scratch)
    workers = [pid for pid in pids if _parent(pid) in pids and _parent(pid) != process.pid]
    for pid in workers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR2)
    time.sleep(0.5)
    process.send_signal(signal.SIGABRT)
    process.wait()
