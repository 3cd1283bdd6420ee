"""The links between this machine's cores: a measured matrix of latency and bandwidth.

    place a ---- shared memory, loopback ----> place b      for each pair of cores, in turn

    latency      half of the round trip of one word or byte, the least of many
    bandwidth    b copies what a has just written; b receives what a sends

A place is a core with a process on it; of more than eight cores, eight are taken, evenly spread.
The matrix gives the ring of highest bandwidth (`collectives/ring_search`); a recorded machine
(`collectives/topology.RECORDED`) gives several rings at once, without measuring. Both ends are
Python, whose own time is in each latency. Accelerators are not measured. This module must not know
schedules. Question, measurement and table are one file, as in the other measurements, which makes
more than 300 lines.
"""

import contextlib
import itertools
import mmap
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..collectives.optimum import cuts
from ..collectives.ring_search import MOST_RANKS, find_rings
from ..collectives.topology import RECORDED, NetworkLink, Topology
from ..errors import ConfigError, unknown
from ..report.text import table, three_figures
from .apart import Apart
from .samples import Measured

MEMORY, LOOPBACK = "shared memory", "loopback"
_NODES = Path("/sys/devices/system/node")
_ROUND_TRIPS, _BLOCKS = 200, 5
_WORDS_BYTES = 4096
"""Before the buffer: a cache line for each side's word."""
_LINE_WORDS = 8
_MOST_RINGS = 8
"""Rings at once in a recorded machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPair(Measured):
    """Latency and bandwidth from one core to another."""

    kind: str
    source: int
    destination: int
    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLinks(Measured):
    """The matrix of this machine.

    Args:
        nodes: core -> its NUMA node.
    """

    num_bytes: int
    nodes: dict[int, int]
    pairs: tuple[MeasuredPair, ...]

    def topology(self, kind: str) -> Topology:
        """Return the cores as ranks, in their order, with a link between each two."""
        ranks = {core: rank for rank, core in enumerate(self.nodes)}
        return Topology(
            name=f"this machine, {kind}", num_ranks=len(ranks), num_switches=0,
            links=tuple(
                NetworkLink(
                    source=ranks[pair.source], destination=ranks[pair.destination],
                    bytes_per_s=pair.bytes_per_s, latency_s=pair.latency_s,
                )
                for pair in self.pairs if pair.kind == kind
            ),
        )  # fmt: skip


# -- the other side: a process on a core -----------------------------------------------------------


class LinkSeat:
    """One end of a link, in a process of its own that `Apart` starts.

    Args:
        core: that the process runs on.
        meeting: a file of `_WORDS_BYTES` and a buffer of ``num_bytes``, mapped by both ends.
    """

    def __init__(self, core: int, meeting: str, num_bytes: int) -> None:
        torch.set_num_threads(1)
        os.sched_setaffinity(0, {core})
        with open(meeting, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _WORDS_BYTES + num_bytes)
        self._words = memoryview(self._memory).cast("q")
        self._shared = torch.frombuffer(
            self._memory, dtype=torch.uint8, offset=_WORDS_BYTES, count=num_bytes
        )
        self._own = torch.ones(num_bytes, dtype=torch.uint8)

    def spin(self, first: bool) -> Mapping[str, object]:
        """Send words there and back; return the least seconds of one way."""
        own, peer = (0, _LINE_WORDS) if first else (_LINE_WORDS, 0)
        words, start = self._words, self._words[peer if first else own]
        trips_s = [0.0] * _ROUND_TRIPS
        for number in range(start + 1, start + 1 + _ROUND_TRIPS):
            start_s = time.perf_counter()
            if first:
                words[own] = number
            while words[peer] < number:
                pass
            if not first:
                words[own] = number
            trips_s[number - start - 1] = time.perf_counter() - start_s
        return {"seconds": min(trips_s) / 2}

    def write(self) -> Mapping[str, object]:
        """Fill the shared buffer, so that this core's cache holds as much of it as fits."""
        self._shared.copy_(self._own)
        return {}

    def read(self) -> Mapping[str, object]:
        """Return the seconds to copy the shared buffer."""
        start_s = time.perf_counter()
        self._own.copy_(self._shared)
        return {"seconds": time.perf_counter() - start_s}

    def listen(self) -> Mapping[str, object]:
        """Open a port on loopback and return its number."""
        self._server = socket.create_server(("127.0.0.1", 0))
        return {"port": self._server.getsockname()[1]}

    def accept(self) -> Mapping[str, object]:
        """Echo single bytes, then acknowledge each whole buffer."""
        end, _ = self._server.accept()
        self._server.close()
        with end:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(_ROUND_TRIPS):
                end.sendall(end.recv(1))
            view = self._own.numpy().data
            for _ in range(_BLOCKS):
                num_read = 0
                while num_read < len(view):
                    num_read += end.recv_into(view[num_read:])
                end.sendall(b"+")
        return {}

    def connect(self, port: int) -> Mapping[str, object]:
        """Return the least one-way latency of a byte, and the median seconds of the buffer."""
        with socket.create_connection(("127.0.0.1", port)) as end:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            one_s = [self._sent_s(end, b"+") for _ in range(_ROUND_TRIPS)]
            all_s = [self._sent_s(end, self._own.numpy().data) for _ in range(_BLOCKS)]
        return {"latency_s": min(one_s) / 2, "seconds": statistics.median(all_s)}

    def _sent_s(self, end: socket.socket, data: bytes | memoryview) -> float:
        """Return the seconds until the other end has acknowledged the data."""
        start_s = time.perf_counter()
        end.sendall(data)
        end.recv(1)
        return time.perf_counter() - start_s


# -- here ------------------------------------------------------------------------------------------


def numa_nodes(cores: Sequence[int], root: Path = _NODES) -> dict[int, int]:
    """Return the NUMA node of each core; 0 if the kernel does not tell."""
    nodes = dict.fromkeys(cores, 0)
    for node in root.glob("node[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            for core in _listed((node / "cpulist").read_text()):
                if core in nodes:
                    nodes[core] = int(node.name.removeprefix("node"))
    return nodes


def _listed(text: str) -> Iterator[int]:
    """Yield the numbers in a list such as ``0-3,8``."""
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def _usable() -> list[int]:
    """Return the cores that this process may use. ConfigError: this system cannot pin a process."""
    if not hasattr(os, "sched_getaffinity"):
        raise ConfigError(
            f"bench links pins processes to cores, which {sys.platform} does not allow; use "
            "--topology to show a recorded machine"
        )
    return sorted(os.sched_getaffinity(0))


def usual_cores() -> tuple[int, ...]:
    """Return up to eight of the cores that this process may use, spread evenly."""
    cores = _usable()
    most = min(MOST_RANKS, len(cores))
    return tuple(cores[number * len(cores) // most] for number in range(most))


def measure_links(
    cores: Sequence[int], num_bytes: int, say: Callable[[str], None] = lambda line: None
) -> MeasuredLinks:
    """Measure every pair of cores in both directions, one after another.

    Raises:
        ConfigError: fewer than two cores, more than eight, or one that may not be used.
        WorkerError: a process died.
    """
    usable = _usable()
    if not 2 <= len(set(cores)) == len(cores) <= MOST_RANKS:
        raise ConfigError(
            f"bench links needs 2 to {MOST_RANKS} different cores, got {len(cores)}; write "
            "--cores 0,1"
        )
    if wrong := [core for core in cores if core not in usable]:
        choices = ",".join(map(str, usable))
        raise ConfigError(f"core {wrong[0]} is not available here; --cores can use {choices}")
    pairs = list[MeasuredPair]()
    with _seats(cores, num_bytes) as seats:
        for source, destination in itertools.permutations(cores, 2):
            say(f"core {source} to core {destination}")
            for kind, measure in ((MEMORY, _through_memory), (LOOPBACK, _through_loopback)):
                latency_s, took_s = measure(seats[source], seats[destination])
                pairs.append(
                    MeasuredPair(
                        kind=kind, source=source, destination=destination,
                        latency_s=latency_s, bytes_per_s=num_bytes / took_s,
                    )
                )  # fmt: skip
    return MeasuredLinks(num_bytes=num_bytes, nodes=numa_nodes(cores), pairs=tuple(pairs))


@contextlib.contextmanager
def _seats(cores: Sequence[int], num_bytes: int) -> Iterator[dict[int, Apart]]:
    """Start a process on each core, with a buffer that they share; close them at the end."""
    shared = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(tempfile.TemporaryDirectory(dir=shared, prefix="paceline-"))
        meeting = Path(place) / "meeting"
        meeting.write_bytes(bytes(_WORDS_BYTES + num_bytes))
        target, environment = f"{LinkSeat.__module__}:{LinkSeat.__name__}", {"OMP_NUM_THREADS": "1"}
        about = {"meeting": str(meeting), "num_bytes": num_bytes}
        yield {
            core: stack.enter_context(Apart(target, {"core": core, **about}, environment))
            for core in cores
        }


def _through_memory(source: Apart, destination: Apart) -> tuple[float, float]:
    """Return the seconds of a word and of the whole buffer."""
    destination.begin("spin", first=False)
    latency_s = float(source.ask("spin", first=True)["seconds"])
    destination.end()
    copies_s = []
    for _ in range(_BLOCKS):
        source.ask("write")
        copies_s.append(float(destination.ask("read")["seconds"]))
    return latency_s, statistics.median(copies_s)


def _through_loopback(source: Apart, destination: Apart) -> tuple[float, float]:
    """Return the seconds of a byte and of the whole buffer."""
    port = destination.ask("listen")["port"]
    destination.begin("accept")
    answer = source.ask("connect", port=port)
    destination.end()
    return float(answer["latency_s"]), float(answer["seconds"])


def recorded(name: str) -> tuple[Topology, ...]:
    """Return a recorded machine as it is, and without NVLink if it has any.

    Raises:
        ConfigError: no recorded machine has this name.
    """
    if name not in RECORDED:
        raise unknown("topology", name, RECORDED)
    return RECORDED[name]


# -- what is printed -------------------------------------------------------------------------------


def render_links(result: MeasuredLinks) -> list[str]:
    """Return the lines of the report: NUMA nodes, both matrices, and the rings."""
    cores = list(result.nodes)
    lines = [
        f"{len(cores)} cores, one pair at a time; {result.num_bytes / 2**20:g} MiB; the core that "
        "has it on the left", "NUMA nodes: " + ", ".join(
            f"{node}: cores {','.join(str(core) for core in cores if result.nodes[core] == node)}"
            for node in sorted(set(result.nodes.values()))
        ),
    ]  # fmt: skip
    for kind in (MEMORY, LOOPBACK):
        pairs = {
            (pair.source, pair.destination): pair for pair in result.pairs if pair.kind == kind
        }
        rows = [
            (
                f"core {source}",
                *(
                    _cell(pairs[source, other]) if source != other else "-" for other in cores
                ),
            )
            for source in cores
        ]  # fmt: skip
        lines += ["", *table((kind, *(f"core {core}" for core in cores)), rows)]
        # One ring: pairs measured in turn do not show how several rings slow each other down.
        lines += _rings(result.topology(kind), cores, most=1)
    return lines


def _cell(pair: MeasuredPair) -> str:
    return f"{pair.bytes_per_s / 1e9:.3g} GB/s, {three_figures(pair.latency_s)}"


def _rings(topology: Topology, names: Sequence[int], most: int) -> list[str]:
    """Return lines with the rings of highest bandwidth, and its share of the narrowest cut."""
    search = find_rings(topology, most)
    share = search.total_bytes_per_s / min(out for _, _, out in cuts(topology))
    count = len(search.rings)
    together = f", {search.total_bytes_per_s / 1e9:.3g} GB/s together" if count > 1 else ""
    return [
        f"{count} ring{'s' * (count != 1)} of {search.each_bytes_per_s / 1e9:.3g} GB/s{together}, "
        f"{share:.0%} of the narrowest cut:",
        *(f"  {' - '.join(str(names[rank]) for rank in ring)}" for ring in search.rings),
    ]


def render_recorded(topologies: Sequence[Topology]) -> list[str]:
    """Return, for each machine, the narrowest link between each two ranks, and the rings."""
    lines = list[str]()
    for topology in topologies:
        ranks = range(topology.num_ranks)
        rows = [
            (
                f"rank {source}",
                *(
                    f"{_width(topology, source, other) / 1e9:.3g}" if source != other else "-"
                    for other in ranks
                ),
            )
            for source in ranks
        ]
        lines += ["", *table((f"{topology.name}, GB/s", *map(str, ranks)), rows)]
        lines += _rings(topology, ranks, _MOST_RINGS)
    return lines[1:]


def recorded_json(topologies: Sequence[Topology]) -> dict[str, object]:
    """Return the machines and their rings as one JSON object."""
    rows = []
    for topology in topologies:
        search = find_rings(topology, _MOST_RINGS)
        ranks = range(topology.num_ranks)
        rows.append({
            "name": topology.name,
            "bytes_per_s": [
                [_width(topology, a, b) if a != b else None for b in ranks] for a in ranks
            ],
            "rings": [list(ring) for ring in search.rings],
            "each_bytes_per_s": search.each_bytes_per_s,
        })  # fmt: skip
    return {"topologies": rows}


def _width(topology: Topology, source: int, destination: int) -> float:
    """Return the bandwidth of the narrowest link between two ranks."""
    route = topology.way(source, destination)
    return min(topology.links[link].bytes_per_s for link in route)
