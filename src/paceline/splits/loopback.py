"""What a message between two processes of this machine costs at least: over a socket, measured.

Latency is half of a way there and back of one byte, bandwidth that of a large message; both ends
are threads of this process, so what a library for messages adds is not in it.
"""

import socket
import threading
import time

from ..collectives.base import LinkCost

_ROUND_TRIPS = 100
_LARGE_BYTES = 1 << 24
_CHUNK_BYTES = 1 << 20


def measure_loopback() -> LinkCost:
    """Takes about 50 ms."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        other = threading.Thread(target=_answer, args=(server,), daemon=True)
        other.start()
        with socket.create_connection(server.getsockname()) as end:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            latency_s = min(_round_trip_s(end) for _ in range(_ROUND_TRIPS)) / 2
            data = bytes(_LARGE_BYTES)
            took_s = min(_sent_s(end, data) for _ in range(3))
        other.join()
    return LinkCost(latency_s=latency_s, s_per_byte=max(0.0, took_s - latency_s) / _LARGE_BYTES)


def _round_trip_s(end: socket.socket) -> float:
    start_s = time.perf_counter()
    end.sendall(b"1")
    end.recv(1)
    return time.perf_counter() - start_s


def _sent_s(end: socket.socket, data: bytes) -> float:
    start_s = time.perf_counter()
    end.sendall(b"L")
    end.sendall(data)
    end.recv(1)
    return time.perf_counter() - start_s


def _answer(server: socket.socket) -> None:
    """A byte for a byte, and one for a large message when all of it is here."""
    end, _ = server.accept()
    buffer = bytearray(_CHUNK_BYTES)
    with end:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while word := end.recv(1):
            left = _LARGE_BYTES if word == b"L" else 0
            while left > 0:
                left -= end.recv_into(buffer, min(left, _CHUNK_BYTES))
            end.sendall(b"1")
