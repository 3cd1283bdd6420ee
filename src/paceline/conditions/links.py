"""What it costs to move a push or a pull: a link of each worker's own, and the server's for all.

    worker --push--> own link: bytes / rate --.
    worker --push--> own link: bytes / rate ---+--> server: one transfer after the other --> there
    worker --push--> own link: bytes / rate --'                  (each way by itself)

A transfer is there when its last byte has passed both, and a latency later. Whoever is called off
has its bytes on the way all the same. It must not know what the bytes are.

Source: store and forward with cut-through; the shared server is the hub of the alpha-beta model
(2(P-1) n beta at the hub), R. Rabenseifner, R. Thakur, "Optimization of Collective Communication
Operations in MPICH", 2005.
"""

import math
import re
from dataclasses import dataclass

from ..errors import ConfigError
from .delays import parse_seconds

_UNITS_BYTES = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "kbit": 125.0, "Mbit": 125e3,
                "Gbit": 125e6}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Bytes an exchange, and what they pass through.

    Args:
        num_bytes: of a push; a pull has as many.
        latency_s: from the last byte sent to the last one there.
        bytes_per_s: of each worker's own link; inf: no limit.
        server_bytes_per_s: of the server's link, each way, shared by all; inf: no limit.
    """

    num_bytes: float
    latency_s: float = 0.0
    bytes_per_s: float = math.inf
    server_bytes_per_s: float = math.inf


class Lane:
    """One way of the server's link: remembers until when it is taken."""

    def __init__(self, link: Link) -> None:
        self._own_s = link.num_bytes / link.bytes_per_s
        self._server_s = link.num_bytes / link.server_bytes_per_s
        self._latency_s = link.latency_s
        self._is_free_s = 0.0

    def there_s(self, start_s: float) -> float:
        """When a transfer is there that begins now; asked in the order of time."""
        self._is_free_s = max(start_s, self._is_free_s) + self._server_s
        return max(start_s + self._own_s, self._is_free_s) + self._latency_s


def parse_link(link: str | None, server: str | None, num_bytes: float | None) -> Link | None:
    """The link that ``1ms,100MB/s`` and a server's ``1GB/s`` describe; None where nothing costs.

    Raises:
        ConfigError: no time or no rate; or a rate without bytes to move, or bytes without one.
    """
    if link is None and server is None:
        return None
    latency, comma, rate = (link or "0s").partition(",")
    latency_s = parse_seconds(latency, link or "", "link")
    own = _bytes_per_s(rate, link or "", "link") if comma else math.inf
    shared = math.inf if server is None else _bytes_per_s(server, server, "server")
    if num_bytes is None and min(own, shared) < math.inf:
        raise ConfigError("a link with a rate needs the bytes of a push: give --bytes, as in 500kB")
    return Link(
        num_bytes=num_bytes or 0.0, latency_s=latency_s, bytes_per_s=own, server_bytes_per_s=shared
    )


def parse_bytes(text: str, setting: str = "bytes") -> float:
    """``500kB`` as a number of bytes. Raises ConfigError."""
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)([A-Za-z]*)", text.replace(" ", ""))
    if match is None or match[2] not in _UNITS_BYTES:
        raise ConfigError(
            f"{setting}: {text!r} is no number of bytes; write it as in 500kB, with one of "
            f"{', '.join(_UNITS_BYTES)}"
        )
    return float(match[1]) * _UNITS_BYTES[match[2]]


def _bytes_per_s(rate: str, text: str, setting: str) -> float:
    amount, slash, unit = rate.partition("/")
    if not slash or unit != "s":
        raise ConfigError(f"{setting} {text!r}: {rate!r} is no rate; write it as in 100MB/s")
    per_s = parse_bytes(amount, setting)
    if per_s == 0:
        raise ConfigError(f"{setting} {text!r}: a rate must be > 0, got {rate!r}")
    return per_s
