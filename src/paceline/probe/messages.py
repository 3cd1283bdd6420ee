"""Latency and bandwidth between cores, processes and machines; the cost of calls and starts.

two cores         a word there and back in one cache line; a buffer that the other core wrote
loopback          a byte there and back over TCP, from core to core; a buffer
a named host      the same, if `paceline probe --serve` runs there; else only the time until the
                  connection is refused, which is one round trip
processes, calls  the overhead of Python, the system and torch
"""

import contextlib
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

import torch

from ..errors import ConfigError, LinkError
from .figures import Figure, Group, Unit
from .kernels import Kernels, WayTimes

PORT = 29_461
"""The default port of ``paceline probe --serve``."""
_BUFFER_BYTES = 4 << 20
_SENT_BYTES = 16 << 20
_REPEATS = 7
_CONNECT_S = 5.0
_BUSY_S = 60.0
"""How long an asker waits for the machine that it asks: it may be answering others first."""
_SILENT_S = 10.0
"""How long what answers waits for an asker: far less, so that a silent one does not use up the
patience of those behind it."""
_CALLS = 20_000


# -- cores and sockets -----------------------------------------------------------------------------


def core_figures(kernels: Kernels) -> Iterator[Figure]:
    """Measure between the first two cores that this process may use."""
    cores, why_not, times = _cores(), "", WayTimes([], [])
    if len(cores) < 2:
        why_not = "this process may use only one core, or the system cannot pin a thread to a core"
    else:
        times = kernels.hand_over(cores[0], cores[1], _BUFFER_BYTES, repeats=_REPEATS)
    how = f"core {cores[0]} to core {cores[1]}" if times.word_s else ""
    yield _way("core_latency_s", "a word from core to core", times, how, why_not)
    yield _rate(
        "core_bytes_per_s", "shared memory, 4 MiB to another core", times, _BUFFER_BYTES, how,
        why_not,
    )  # fmt: skip


def loopback_figures(kernels: Kernels) -> Iterator[Figure]:
    """Measure over TCP, to a native thread of this process; each thread is pinned to its own core.

    Otherwise the system may put both on one core, where a byte arrives several times as fast.
    """
    here, there = cores[:2] if len(cores := _cores()) > 1 else (None, None)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server_thread = threading.Thread(
            target=_serve_one, args=(kernels, server, there), daemon=True
        )
        server_thread.start()
        with _connected(server.getsockname()) as end, _pinned_to(here):
            times = kernels.ping(end.fileno(), _SENT_BYTES, repeats=_REPEATS)
        server_thread.join()
    how = "TCP, one way" if here is None else f"TCP, one way, core {here} to core {there}"
    yield _way("loopback_latency_s", "loopback, a byte", times, how)
    yield _rate("loopback_bytes_per_s", "loopback, 16 MiB", times, _SENT_BYTES, "TCP")


def peer_figures(kernels: Kernels | None, peer: str) -> Iterator[Figure]:
    """Measure to another machine. LinkError: it cannot be reached."""
    host, port = read_peer(peer)
    address = find_peer(peer)
    times, why_not = WayTimes([], []), ""
    took_s, answers = _knock(address, peer)
    yield Figure(
        key="peer_round_trip_s", what=f"{host}, there and back", group=Group.MESSAGES,
        unit=Unit.SECONDS, samples=tuple(took_s), how="TCP, a connection attempt",
    )  # fmt: skip
    if kernels is None:
        why_not = "there is no C++ compiler here"
    elif not answers:
        why_not = (
            f"nothing listens on port {port}; run on that machine: paceline probe --serve {port}"
        )
    else:
        with _connected(address) as end, contextlib.suppress(ConnectionError):
            times = kernels.ping(end.fileno(), _SENT_BYTES, repeats=_REPEATS)
        if not times.word_s:
            why_not = (
                f"it closed the connection or sent nothing for {_BUSY_S:g} s; end what listens "
                f"on its port {port}, and run there: paceline probe --serve {port}"
            )
    yield _way("peer_latency_s", f"{host}, a byte", times, "TCP, one way", why_not)
    yield _rate("peer_bytes_per_s", f"{host}, 16 MiB", times, _SENT_BYTES, "TCP", why_not)


def read_peer(peer: str) -> tuple[str, int]:
    """Parse ``HOST`` or ``HOST:PORT``.

    Raises:
        ConfigError: it is neither.
    """
    host, colon, port = peer.rpartition(":") if peer.count(":") == 1 else (peer, "", "")
    if not host or (colon and not (port.isdigit() and 0 < int(port) < 1 << 16)):
        raise ConfigError(
            f"--peer must be HOST or HOST:PORT, got {peer!r}; for example 10.0.0.7:{PORT}"
        )
    return host, int(port) if port else PORT


def find_peer(peer: str) -> tuple[object, ...]:
    """Resolve ``HOST`` or ``HOST:PORT``.

    Raises:
        ConfigError: it is neither.
        LinkError: the host is unknown.
    """
    host, port = read_peer(peer)
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][:2]
    except OSError as error:
        raise LinkError(f"--peer {peer}: unknown host {host}: {error.strerror}") from None
    except UnicodeError as error:  # a name that cannot be encoded for DNS
        raise LinkError(f"--peer {peer}: {host} is not a valid host name: {error}") from None


def serve(kernels: Kernels, port: int, say: Callable[[str], None]) -> NoReturn:
    """Answer one probe after another until this process is ended; none that falls silent.

    Raises:
        ConfigError: the port cannot be opened.
    """
    try:
        server = socket.create_server(("", port))
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--serve {port}: {error}; choose another port") from None
    with server:
        here = f"{socket.gethostname()}:{server.getsockname()[1]}"
        say(f"listening; on the other machine: paceline probe --peer {here}")
        while True:
            _serve_one(kernels, server)


def _cores() -> list[int]:
    """Return the cores that this process may use and can pin a thread to."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


@contextlib.contextmanager
def _pinned_to(core: int | None) -> Iterator[None]:
    """Pin this thread to a core; None: leave it to the system."""
    if core is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _serve_one(kernels: Kernels, server: socket.socket, core: int | None = None) -> None:
    end, _ = server.accept()
    with end, _pinned_to(core):
        _prepare(end, _SILENT_S)
        kernels.answer(end.fileno())


@contextlib.contextmanager
def _connected(address: tuple[object, ...]) -> Iterator[socket.socket]:
    """Connect; the socket gets what the kernels need."""
    with socket.create_connection(address[:2], timeout=_CONNECT_S) as end:  # type: ignore[arg-type]  # a host and a port, as getsockname gives them
        _prepare(end, _BUSY_S)
        yield end


def _prepare(end: socket.socket, silent_s: float) -> None:
    """Let calls of the kernels wait for the other end, but no longer than this."""
    limit = struct.pack("ll", *divmod(round(silent_s * 1e6), 1_000_000))
    end.settimeout(None)  # Python's own would make the calls return at once
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _knock(address: tuple[object, ...], peer: str) -> tuple[list[float], bool]:
    """Return the seconds until a connection is made or refused, and whether it was made."""
    took_s, answers = [], False
    for _ in range(_REPEATS):
        start_s = time.perf_counter()
        try:
            socket.create_connection(address, timeout=_CONNECT_S).close()  # type: ignore[arg-type]  # the same
            answers = True
        except ConnectionRefusedError:
            pass
        except OSError as error:
            raise LinkError(f"--peer {peer} cannot be reached: {error}") from None
        took_s.append(time.perf_counter() - start_s)
    return took_s, answers


def _way(key: str, what: str, times: WayTimes, how: str, why_not: str = "") -> Figure:
    return Figure(
        key=key, what=what, group=Group.MESSAGES, unit=Unit.SECONDS, samples=tuple(times.word_s),
        how=how, why_not=why_not,
    )  # fmt: skip


def _rate(key: str, what: str, times: WayTimes, size: int, how: str, why_not: str = "") -> Figure:
    return Figure(
        key=key, what=what, group=Group.MESSAGES, unit=Unit.BYTES,
        samples=tuple(size / duration_s for duration_s in times.buffer_s), how=how, why_not=why_not,
    )  # fmt: skip


# -- processes and calls ---------------------------------------------------------------------------


def software_figures() -> Iterator[Figure]:
    """Yield the cost of starting and of calling something that does nothing."""
    number = torch.ones(1)
    python = [sys.executable, "-S", "-c", "pass"]
    for key, what, work, count, repeats, how in (
        ("python_call_s", "a call of a Python function", _nothing, _CALLS, 9, "an empty function"),
        ("torch_call_s", "a call of torch", lambda: torch.add(number, number), 2000, 9,
         "the sum of two numbers"),
        ("thread_start_s", "a thread, started and ended", _thread, 50, 9, "Python's"),
        ("process_start_s", "a process, started and ended", lambda: _ended(["/bin/true"]), 5, 7,
         "/bin/true"),
        ("python_start_s", "a Python, started and ended", lambda: _ended(python), 1, 5,
         "without its site packages"),
    ):  # fmt: skip
        with contextlib.suppress(OSError):
            yield Figure(
                key=key, what=what, group=Group.SOFTWARE, unit=Unit.SECONDS,
                samples=tuple(_each_s(work, count) for _ in range(repeats)), how=how,
            )  # fmt: skip


def _nothing() -> None:
    return None


def _thread() -> None:
    thread = threading.Thread(target=_nothing)
    thread.start()
    thread.join()


def _ended(command: list[str]) -> None:
    subprocess.run(command, stdin=subprocess.DEVNULL, check=False)


def _each_s(work: Callable[[], object], count: int) -> float:
    """Return the seconds of one call, without the loop around the calls."""
    loop_s = min(_repeated_s(None, count) for _ in range(3))
    return (_repeated_s(work, count) - loop_s) / count


def _repeated_s(work: Callable[[], object] | None, count: int) -> float:
    start_s = time.perf_counter()
    if work is None:
        for _ in range(count):
            pass
    else:
        for _ in range(count):
            work()
    return time.perf_counter() - start_s
