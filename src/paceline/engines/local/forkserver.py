"""The process that members are forked from: it imports torch once and uses no device.

    launcher --socket--> fork server --fork--> member, member, ...

The user's process is never forked, so it may have used its accelerator. The fork server has one
thread, watches the launcher through the socket and kills every member when the launcher is gone; a
member dies with the fork server. As the members' parent it also learns when one is stopped, and it
kills a member on request: that pid cannot be reused before the fork server has reaped the member.

    launcher -> fork server    a spec, with descriptors   {"kill": member}
                           {"empty": 0}: end all members  {"adopt": settings}: serve another run
    fork server -> launcher    {"ready": pid}                 {"started": member, "pid": pid}
                           {"unable": reason}: no member can be forked
                           {"refused": reason}: not for this run
                           {"stopped": member}            {"continued": member}
                           {"ended": member, "code": exit code}      {"emptied": 0}
                           {"ended": member, "code": 71, "unable": reason}: it was not forked

Above 300 lines since the temporary folder of the members' own processes is here, too, which the
fork server owns. This module must not know what a member does.
"""

import contextlib
import gc
import importlib
import json
import multiprocessing
import multiprocessing.process
import multiprocessing.queues
import multiprocessing.util
import os
import shutil
import signal
import socket
import stat
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from ...errors import ConfigError
from ...system.interpreter import leave_in_place
from ...system.signals import die_with_parent, leave_to_the_launcher
from ...system.streams import open_standard_streams, wait_for
from ...system.vitals import ProcessState, read_vitals
from ..base import MemberSpec
from .preload import import_once

_MAX_BYTES = 1 << 20
_UNABLE = 71
"""Exit code of a process that could not be started (EX_OSERR)."""
_MAX_REASON_CHARS = 500
_IN_EVERY_MEMBER = ("torch", "torch._dynamo", "numpy.ctypeslib", "cloudpickle", "safetensors.torch")
"""Each member would import them: for its first optimizer, shared array, and saved model."""


class ProcessConfig(dict[str, Any]):
    """The settings that multiprocessing keeps for a process; makes its folder at the first use.

    If launcher and fork server are killed at the same moment, no process is left to remove the
    folder. So none is made once the fork server is gone: the launcher has removed it by then.

    Attributes:
        server: the fork server's process.
    """

    server = 0

    def get(self, key: str, default: Any = None) -> Any:
        value = super().get(key, default)
        if key != "tempdir" or value is None:
            return value
        is_usable = not self._is_server_gone() and _make_folder(value)
        if self._is_server_gone():
            with contextlib.suppress(OSError):
                os.rmdir(value)  # made just as the fork server ended
            if multiprocessing.parent_process() is not None:
                os._exit(1)  # started by a member, which is dying: nothing waits for this process
            return None
        if not is_usable:
            return None
        _exit_early_without(value)
        return value

    def _is_server_gone(self) -> bool:
        return read_vitals(self.server).state is ProcessState.ENDED

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[dict[str, Any]]]:
        """Pickle as a plain dict: a spawned process may not have this class; the folder exists."""
        return dict, ({**self, "tempdir": self.get("tempdir")},)

    def copy(self) -> "ProcessConfig":
        """Return the settings for a process that this one starts."""
        return ProcessConfig(self)


_user_pid = 0
"""The process that has used the folder: it checks at its end and on failure that it exists."""


def _exit_early_without(folder: str) -> None:
    """Run ``_exit_without(folder)`` at this process's end, before it removes any file itself."""
    global _user_pid
    if _user_pid != os.getpid():
        _user_pid = os.getpid()
        multiprocessing.util.Finalize(None, _exit_without, (folder,), exitpriority=100)


def _exit_without(folder: str) -> None:
    """Exit at once if the folder is gone, with all files that this process would remove.

    A member does not: it still has to report its end.
    """
    if multiprocessing.parent_process() is not None and not os.path.isdir(folder):
        os._exit(1)


def _quiet_without(on_error: Callable[[Exception, object], None], folder: str) -> Any:
    """Wrap the handler of a batch that cannot be sent: silent if its socket's folder is gone."""

    def handle(error: Exception, item: object) -> None:
        if _user_pid == os.getpid():
            _exit_without(folder)
        on_error(error, item)

    return staticmethod(handle)


def _make_folder(folder: str) -> bool:
    """Make the folder; returns whether it is ours. If not, each process makes one for itself."""
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        status = os.lstat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()


def use_temp_dir(folder: str) -> None:
    """Have multiprocessing use this folder, here and in all forked processes."""
    process: Any = multiprocessing.process.current_process()
    ProcessConfig.server = os.getpid()
    process._config = ProcessConfig(process._config, tempdir=folder)
    queue: Any = multiprocessing.queues.Queue
    queue._on_queue_feeder_error = _quiet_without(queue._on_queue_feeder_error, folder)


class ForkServer:
    """Forks members on request and reports how they end.

    Args:
        scratch: the folder for files of the members' own processes, such as the sockets through
            which a DataLoader's workers send batches; removed when the fork server ends.
    """

    def __init__(self, launcher: socket.socket, scratch: str) -> None:
        self._launcher = launcher
        self._scratch = scratch
        self._members_by_pid: dict[int, int] = {}
        self._wake_in, wake_out = os.pipe()
        os.set_blocking(wake_out, False)
        os.set_blocking(self._wake_in, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_out, warn_on_full_buffer=False)

    def run(self) -> None:
        """Serve until the launcher is gone."""
        try:
            use_temp_dir(self._scratch)
            self._launcher.send(json.dumps({"ready": os.getpid()}).encode())
            while True:
                launcher = self._launcher.fileno()
                ready = wait_for([launcher, self._wake_in])
                if self._wake_in in ready:
                    os.read(self._wake_in, 4096)
                    self._reap()
                if launcher in ready and not self._serve():
                    return
        except ConnectionError:  # the launcher is gone already
            return
        finally:
            self._kill_all()
            shutil.rmtree(self._scratch, ignore_errors=True)

    def give_up(self, reason: str) -> NoReturn:
        """Report that no member can be forked here, and end."""
        self._tell({"unable": reason[:_MAX_REASON_CHARS]})
        os._exit(_UNABLE)

    def _serve(self) -> bool:
        data, descriptors, _, _ = socket.recv_fds(self._launcher, _MAX_BYTES, 8)
        if not data:
            return False
        request = json.loads(data)
        if "kill" in request:
            self._kill(request["kill"])
            return True
        if "empty" in request:
            self._kill_all()
            self._tell({"emptied": 0})
            return True
        if "adopt" in request:
            self._adopt(descriptors, **request["adopt"])
            return True
        spec = MemberSpec(**request)
        try:
            import_once(spec.preload, spec.search_path)
        except ConfigError as error:
            self._tell({"refused": str(error)[:_MAX_REASON_CHARS]})
            return False  # no other run should get what the import has left behind
        try:
            pid = os.fork()
        except OSError as error:
            pid = -1
            self._tell({"ended": spec.member, "code": _UNABLE, "unable": error.strerror})
        if pid == 0:
            self._become(spec, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        if pid > 0:
            self._members_by_pid[pid] = spec.member
            self._tell({"started": spec.member, "pid": pid})
        return True

    def _adopt(self, streams: list[int], environment: dict[str, str], folder: str) -> None:
        """Serve another run of the same launcher."""
        for number, stream in enumerate(streams, 1):
            os.dup2(stream, number)
            os.close(stream)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        self._tell({"ready": os.getpid()})

    def _become(self, spec: MemberSpec, descriptors: list[int]) -> None:
        """Be the member, in the child; never returns. Ends if the parent is gone already."""
        die_with_parent()
        if os.getppid() != ProcessConfig.server:
            os._exit(1)
        code = 70
        try:
            gc.enable()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._launcher.close()
            os.close(self._wake_in)
            from .process import run_member

            code = run_member(spec, descriptors)
        except BaseException:  # a member ends here, whatever it raised; the parent gets its code
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if os.WIFSTOPPED(status) or os.WIFCONTINUED(status):
                kind = "stopped" if os.WIFSTOPPED(status) else "continued"
                self._tell({kind: self._members_by_pid.get(pid, -1)})
                continue
            if os.WIFSIGNALED(status):  # it was killed: kill the processes that it started, too
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
            member = self._members_by_pid.pop(pid, None)
            if member is not None:
                code = os.waitstatus_to_exitcode(status)
                self._tell({"ended": member, "code": code})

    def _tell(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):  # the launcher closes while the last ones end
            self._launcher.send(json.dumps(message).encode())

    def _kill(self, member: int) -> None:
        """End a member that was given up, and all processes that it started."""
        for pid, number in self._members_by_pid.items():
            if number == member:
                _kill_group(pid)

    def _kill_all(self) -> None:
        for pid in self._members_by_pid:
            _kill_group(pid)
        for pid in self._members_by_pid:
            try:
                os.waitpid(pid, 0)
            except ChildProcessError:
                continue
        self._members_by_pid.clear()


def _kill_group(pid: int) -> None:
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def _import_all() -> None:
    """Import once for all members, before the fork; the garbage collector skips these objects."""
    gc.disable()
    for name in _IN_EVERY_MEMBER:
        importlib.import_module(name)
    from ... import trainer  # noqa: F401  imported for all members
    from ...exchange import shares  # noqa: F401  the same
    from ...script import worker  # noqa: F401  the same
    from . import process  # noqa: F401  the same

    leave_in_place()
    gc.freeze()  # a collection in a member would copy each page that it reads


def main() -> None:
    """Entry of ``python -m paceline.engines.local.forkserver FD SCRATCH``."""
    leave_to_the_launcher()
    # While it imports it dies with the launcher (see client.py), which may be gone already.
    open_standard_streams()
    launcher, scratch = socket.socket(fileno=int(sys.argv[1])), sys.argv[2]
    if wait_for([launcher.fileno()], timeout_s=0.0) and not launcher.recv(1, socket.MSG_PEEK):
        return
    server = ForkServer(launcher, scratch)
    try:
        _import_all()
    except Exception as error:  # too little memory, or a broken installation
        server.give_up(f"{type(error).__name__}: {error}")
    threads = len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 1
    assert threads == 1, f"the fork server must have one thread to fork, it has {threads}"
    # From here on the socket tells it that the launcher is gone, and it ends all members first; the
    # parent-death signal only continues it, in case it is stopped.
    die_with_parent(signal.SIGCONT)
    server.run()
    os._exit(0)  # at once: torch would take a second to unload


if __name__ == "__main__":
    main()
