"""The compiled kernels measure what they claim, or give the reason why they cannot."""

import os
import queue
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import psutil
import pytest

from paceline.errors import ConfigError, FileError, LinkError
from paceline.machine.processor import Cache
from paceline.probe import messages, storage
from paceline.probe.figures import Figure, Unit
from paceline.probe.kernels import Kernels, Pass, VectorFormat, compiled
from paceline.probe.memory import latency_curve, memory_bytes, memory_figures
from paceline.probe.messages import (
    core_figures,
    loopback_figures,
    peer_figures,
    read_peer,
    serve,
    software_figures,
)
from paceline.probe.storage import storage_figures

MIB = 1 << 20
CACHES = (Cache(kind="L1d", num_bytes=32 << 10, count=1), Cache(kind="L2", num_bytes=MIB, count=1))


@pytest.fixture(scope="module")
def kernels() -> Iterator[Kernels]:
    with compiled() as built:
        yield built


def test_memory_load_takes_longer_than_a_first_cache_load(kernels: Kernels) -> None:
    near = min(kernels.chase(8 << 10, 20_000))
    far = min(kernels.chase(32 * MIB, 20_000))
    assert 0 < near < far


def test_independent_loads_take_less_time_each(kernels: Kernels) -> None:
    one = min(kernels.chase(32 * MIB, 20_000, rings=1))
    many = min(kernels.chase(32 * MIB, 20_000, rings=16))
    assert many < one


def test_passes_count_bytes_as_the_stream_benchmark(kernels: Kernels) -> None:
    assert [one.arrays for one in Pass] == [1, 2, 3]
    for what in Pass:
        assert min(kernels.stream(what, MIB, 2, 2)) > 0


def test_every_format_is_measured_or_left_out(kernels: Kernels) -> None:
    assert kernels.vector_bits() in (128, 256, 512)
    for kind in VectorFormat:
        per_s = kernels.arithmetic(kind, 1000, 1, 2)
        assert per_s is None or min(per_s) > 0
    assert kernels.arithmetic(VectorFormat.FP32, 1000, 1, 1) is not None


def test_too_little_memory_is_reported(kernels: Kernels) -> None:
    with pytest.raises(MemoryError, match="too little memory"):
        kernels.chase(1 << 60, 10)


def test_missing_compiler_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=r"no C\+\+ compiler: no-such-compiler .* apt install"):
        compiled().__enter__()


def test_failing_compiler_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(ConfigError, match="false cannot compile the probe's kernels: it failed"):
        compiled().__enter__()


def keys(figures: Iterator[Figure]) -> dict[str, Figure]:
    return {figure.key: figure for figure in figures}


def test_memory_figures_are_complete(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.probe.memory.memory_bytes", lambda caches: 4 * MIB)
    monkeypatch.setattr("paceline.probe.memory._MEMORY_STEPS", 1000)
    figures = keys(memory_figures(kernels, CACHES, 2))
    assert figures["l3_latency_s"].why_not.startswith("this machine has none")
    for key, one in figures.items():
        assert key.endswith(f"_{one.unit.value}")
        assert (one.best or 0) > 0 or key == "l3_latency_s"
    assert [one.num_bytes for one in latency_curve(kernels, CACHES)][-1] == 4 * MIB


def test_memory_measurement_exceeds_every_cache() -> None:
    size = memory_bytes(CACHES)
    assert size & (size - 1) == 0
    assert size >= MIB


def test_data_read_by_all_cores_exceeds_their_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight last-level caches of 32 MiB together hold more than one of them."""
    monkeypatch.setattr("paceline.probe.memory.available_bytes", lambda: 1 << 40)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 40))
    caches = (*CACHES, Cache(kind="L3", num_bytes=32 * MIB, count=8))
    kernels = MagicMock(spec=Kernels)
    kernels.chase.return_value = kernels.stream.return_value = [1.0]
    assert all(one.best for one in memory_figures(kernels, caches, 64))
    streams = [one.args for one in kernels.stream.call_args_list]
    assert {size for _, size, threads, _ in streams if threads == 64} == {1024 * MIB}
    alone = {size for _, size, threads, _ in streams if threads == 1}
    assert alone == {128 * MIB} == {max(one.args[0] for one in kernels.chase.call_args_list)}


def test_disk_is_measured_and_left_unchanged(
    kernels: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "_FILE_BYTES", 16 * MIB)
    monkeypatch.setattr(storage, "_ROUND_S", 0.02)
    figures = keys(storage_figures(kernels, tmp_path))
    assert sorted(figures) == [
        "disk_read_bytes_per_s", "disk_read_latency_s", "disk_reads_per_s",
        "disk_write_bytes_per_s",
    ]  # fmt: skip
    assert all((figure.best or 0) > 0 and "O_DIRECT" in figure.how for figure in figures.values())
    assert list(tmp_path.iterdir()) == []


def test_report_says_when_the_disk_cache_may_have_answered(
    kernels: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "_FILE_BYTES", 16 * MIB)
    monkeypatch.setattr(storage, "_ROUND_S", 0.02)
    monkeypatch.setattr(storage, "_DIRECT", 0)
    figures = keys(storage_figures(kernels, tmp_path))
    assert all("may have answered" in figure.how for figure in figures.values())


def test_missing_folder_is_named(kernels: Kernels, tmp_path: Path) -> None:
    with pytest.raises(FileError, match="nowhere"):
        list(storage_figures(kernels, tmp_path / "nowhere"))


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two cores are needed")
def test_core_to_core_figures_are_measured(kernels: Kernels) -> None:
    figures = keys(core_figures(kernels))
    assert all((figure.best or 0) > 0 for figure in figures.values())


def test_loopback_and_calls_are_measured(kernels: Kernels) -> None:
    result = keys(loopback_figures(kernels)) | keys(software_figures())
    assert result["loopback_latency_s"].unit is Unit.SECONDS
    assert {"python_call_s", "torch_call_s", "process_start_s"} < result.keys()
    assert all((value.best or 0) > 0 for value in result.values())


def served(kernels: Kernels) -> int:
    """The port of a ``paceline probe --serve`` in a thread."""
    said: queue.Queue[str] = queue.Queue()
    threading.Thread(target=serve, args=(kernels, 0, said.put), daemon=True).start()
    return int(said.get(timeout=10).rpartition(":")[2])


def test_serving_peer_is_measured(kernels: Kernels) -> None:
    port = served(kernels)
    figures = keys(peer_figures(kernels, f"127.0.0.1:{port}"))
    assert (figures["peer_bytes_per_s"].best or 0) > 0
    assert (figures["peer_round_trip_s"].best or 0) > 0


def test_peer_that_does_not_serve_gives_only_the_round_trip(kernels: Kernels) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    figures = keys(peer_figures(kernels, f"127.0.0.1:{port}"))
    assert (figures["peer_round_trip_s"].best or 0) > 0
    assert f"paceline probe --serve {port}" in figures["peer_latency_s"].why_not


def test_peer_that_sends_nothing_is_given_up(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "_BUSY_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        figures = keys(peer_figures(kernels, f"127.0.0.1:{port}"))
    assert (figures["peer_round_trip_s"].best or 0) > 0
    said = figures["peer_latency_s"].why_not
    assert "sent nothing for 0.1 s" in said
    assert f"paceline probe --serve {port}" in said


def test_asker_that_sends_nothing_does_not_keep_out_others(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "_SILENT_S", 0.2)
    port = served(kernels)
    with socket.create_connection(("127.0.0.1", port)):
        figures = keys(peer_figures(kernels, f"127.0.0.1:{port}"))
    assert (figures["peer_bytes_per_s"].best or 0) > 0


@pytest.mark.parametrize("peer", ["host:port", ":1", "host:0", "host:70000", ""])
def test_invalid_peer_is_refused(peer: str) -> None:
    with pytest.raises(ConfigError, match=r"--peer must be HOST or HOST:PORT"):
        read_peer(peer)


def test_unknown_peer_is_named() -> None:
    with pytest.raises(LinkError, match="unknown host"):
        list(peer_figures(None, "no-such-host.invalid"))


@pytest.mark.parametrize("peer", ["10..0.7", f"{'long' * 16}.org:80"])
def test_invalid_host_name_is_named(peer: str) -> None:
    with pytest.raises(LinkError, match="is not a valid host name"):
        list(peer_figures(None, peer))


def test_unavailable_port_is_named(kernels: Kernels) -> None:
    with pytest.raises(ConfigError, match=r"--serve 70000: .*choose another port"):
        serve(kernels, 70_000, lambda line: None)
