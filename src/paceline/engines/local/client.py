"""The launcher's end of a fork server, which ends with its run or is kept warm for the next one.

    client  --socket-->  fork server --fork--> members

    with warm():      consecutive runs in here share one fork server: torch is imported once, and
        run(...)      the next run starts in a hundredth of the time
        run(...)
    with begun_early():  torch is imported while this process still imports what a run needs
        run(...)

A fork server that is passed to another run has no members left and takes over that run's
environment, folder and streams. Above 300 lines, since its whole life is read together: its start,
its messages, its reuse. This module must not know members, messages between them, or protocols.
"""

import contextlib
import json
import math
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ...errors import AllGone, ConfigError, LinkError, WorkerError
from ...system.interpreter import safe_path_flag
from ...system.limits import Toll, describe_limits
from ...system.signals import die_with_parent, held_back
from ...system.streams import wait_for
from ...system.vitals import ProcessState, read_vitals
from ...wire.channel import socket_pair
from ..base import THREADS

_START_S, _END_S = 120.0, 2.0
_CHECK_S, _STOPPED_S = 0.5, 2.0
"""Between two checks whether it is stopped; until it is continued."""
_ENVIRONMENT = dict.fromkeys(THREADS, "1")
"""One thread in a fork server, so that it can fork; members have the user's own variables."""

_MAX_TRIES = 10
_GONE = "the process that workers are forked from is gone"


class ForkServerClient:
    """One fork server, from the launcher's side.

    Attributes:
        preloaded: modules that it has imported for a run, and that another run may not want.
    """

    def __init__(self) -> None:
        self._socket, server_end = socket_pair()
        self._scratch = os.path.join(tempfile.gettempdir(), f"pace-{secrets.token_hex(4)}")
        self._toll = Toll(time.monotonic())
        module = "paceline.engines.local.forkserver"
        command = [*safe_path_flag(), "-m", module, str(server_end.fileno()), self._scratch]
        with held_back():
            self._process = subprocess.Popen(
                [sys.executable, *command],
                pass_fds=[server_end.fileno()],
                env={**os.environ, **_ENVIRONMENT},
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        server_end.close()
        self._early: list[dict[str, int]] = []
        """Messages that arrived while another one was awaited."""
        self.preloaded: frozenset[str] = frozenset()
        self._has_members = False
        self._is_new = True
        self._next_check_s, self._stopped_s = 0.0, math.inf

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        return self._socket.fileno()

    def fork_member(self, spec: Mapping[str, Any], descriptors: Sequence[int]) -> None:
        """Request the fork of a member.

        Raises:
            AllGone: the fork server is gone.
        """
        self._has_members, self._is_new = True, False
        with self._raising_all_gone():
            socket.send_fds(self._socket, [json.dumps(spec).encode()], list(descriptors))

    def kill(self, member: int) -> None:
        """Request the end of a member and all its child processes.

        Raises:
            AllGone: the fork server is gone.
        """
        with self._raising_all_gone():
            self._socket.send(json.dumps({"kill": member}).encode())

    def await_message(self, kind: str, within_s: float = _START_S) -> dict[str, int]:
        """Return the next message of this kind; others are kept for `early_messages`.

        Raises:
            AllGone: the fork server was killed.
            ConfigError: it cannot serve this run.
            WorkerError: it could not start, or did not answer in time.
        """
        end_s = time.monotonic() + within_s
        while time.monotonic() < end_s:
            self.wake_if_stopped()
            data = b""
            is_readable = bool(wait_for([self._socket.fileno()], timeout_s=0.5))
            if is_readable:
                with contextlib.suppress(ConnectionError):  # it ended without reading
                    data = self._socket.recv(1 << 16)
            if data:
                message: dict[str, int] = json.loads(data)
                if "unable" in message:
                    raise _unable(message["unable"])
                if "refused" in message:
                    raise ConfigError(str(message["refused"]))
                if kind in message:
                    return message
                self._early.append(message)
            elif is_readable:  # end of file, which stays readable: the process is ending
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(max(0.0, end_s - time.monotonic()))
            if (code := self._process.poll()) is not None:
                if code < 0 or not self._is_new:
                    raise self._all_gone(f" (killed by signal {-code})" if code < 0 else "")
                raise WorkerError(
                    "the process that workers are forked from did not start "
                    f"(exit {code}); see the messages above"
                )
        raise WorkerError(f"workers could not be started within {within_s:.0f} s")

    def early_messages(self) -> list[dict[str, int]]:
        """Return messages that have arrived and are not handled yet."""
        early, self._early = self._early, []
        return early

    def next_message(self) -> dict[str, int] | None:
        """Return the next message without waiting; None if there is none.

        Raises:
            AllGone: the fork server is gone.
        """
        try:
            data = self._socket.recv(1 << 16, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except ConnectionError:
            data = b""
        if not data:
            raise self._all_gone()
        message: dict[str, int] = json.loads(data)
        return message

    def wake_if_stopped(self) -> bool:
        """Continue it if it was stopped; returns whether it was. Called repeatedly.

        While it is stopped no worker starts, and no death is reported.
        """
        now_s = time.monotonic()
        self._toll.look(now_s)
        if now_s < self._next_check_s:
            return False
        self._next_check_s = now_s + _CHECK_S
        is_stopped = read_vitals(self.pid).state is ProcessState.STOPPED
        self._stopped_s = min(self._stopped_s, now_s) if is_stopped else math.inf
        if now_s - self._stopped_s < _STOPPED_S:
            return False
        self._stopped_s = math.inf
        os.kill(self.pid, signal.SIGCONT)
        return True

    # -- from run to run ------------------------------------------------------------------------

    def hand_on(self) -> None:
        """Pass it to another run, with this process's environment, folder and streams."""
        if self._is_new:
            return
        settings = {"environment": {**os.environ, **_ENVIRONMENT}, "folder": os.getcwd()}
        socket.send_fds(self._socket, [json.dumps({"adopt": settings}).encode()], [1, 2])

    def empty(self) -> bool:
        """End all members; returns whether it can serve another run."""
        try:
            self._socket.send(b'{"empty": 0}')
            self.await_message("emptied", _END_S)
        except (OSError, WorkerError):
            return False
        self._early.clear()
        self._has_members = False
        return True

    def close(self) -> None:
        """End it and all members."""
        self._socket.close()
        if not self._has_members:  # it may still be importing, and has no child to end
            self._process.kill()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._remove_scratch()

    @contextmanager
    def _raising_all_gone(self) -> Iterator[None]:
        """Raise AllGone if the fork server is gone."""
        try:
            yield
        except ConnectionError:
            raise self._all_gone() from None

    def _remove_scratch(self) -> None:
        """Remove the folder of a killed fork server, while its members may still write there."""
        for _ in range(_MAX_TRIES):
            shutil.rmtree(self._scratch, ignore_errors=True)
            if not os.path.lexists(self._scratch):
                return
            time.sleep(0.01)

    def _all_gone(self, cause: str = "") -> AllGone:
        self._remove_scratch()  # at once: this process may be killed, too
        return AllGone(f"{_GONE}{cause}{self._toll.explain(time.monotonic())}")


def _unable(reason: object) -> LinkError:
    limits = describe_limits()
    allowed = f" (memory allowed: {limits})" if limits else ""
    return LinkError(f"workers cannot be started: {reason}{allowed}")


_is_warm = False
_spare: list[ForkServerClient] = []
"""At most one: the fork server that waits for the next run."""


@contextmanager
def warm() -> Iterator[None]:
    """Reuse one fork server for all runs in this block."""
    global _is_warm
    if _is_warm:
        yield
        return
    _is_warm = True
    try:
        yield
    finally:
        _is_warm = False
        while _spare:
            _spare.pop().close()


@contextmanager
def begun_early() -> Iterator[None]:
    """Start the fork server for the run in this block early; without a run it ends at once."""
    if not _spare:
        _spare.append(ForkServerClient())
    try:
        yield
    finally:
        while _spare and not _is_warm:
            _spare.pop().close()


def kept() -> ForkServerClient | None:
    """Return the fork server that waits for the next run; for tests of what a run leaves behind."""
    return _spare[0] if _spare else None


def take() -> ForkServerClient:
    """Return the kept fork server or a new one; it sends ``ready`` once it can fork."""
    while _spare:
        spare = _spare.pop()
        try:
            spare.hand_on()
        except OSError:  # it has died since, or the environment is too large to send
            spare.close()
        else:
            return spare
    return ForkServerClient()


def take_with(server: ForkServerClient, preload: Sequence[str]) -> ForkServerClient:
    """Return this fork server, or a new one if it has imported modules that are not listed."""
    if not server.preloaded <= set(preload):
        server.close()
        server = ForkServerClient()
    server.preloaded = frozenset(preload)
    return server


def give_back(server: ForkServerClient) -> None:
    """End the run's members, and keep the fork server within a `warm` block."""
    if _is_warm and not _spare and server.empty():
        _spare.append(server)
    else:
        server.close()
