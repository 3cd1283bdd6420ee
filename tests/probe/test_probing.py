"""A whole probe: figures that are kept, shown, or missing with a reason."""

import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline.machine.ceilings import read_machine
from paceline.probe import probing
from paceline.probe.devices import device_figures
from paceline.probe.figures import TEXTBOOK, Figure, Group, Unit
from paceline.probe.memory import LatencyOfSize
from paceline.probe.picture import draw_probe
from paceline.probe.probing import Probe, ProbeQuestion, keep, probe_machine
from paceline.probe.rates import matmul_figures
from paceline.probe.tables import render_probe


def figure(key: str, unit: Unit, *samples: float, why_not: str = "") -> Figure:
    return Figure(
        key=key, what=key.replace("_", " "), group=Group.MEMORY, unit=unit, samples=samples,
        why_not=why_not,
    )  # fmt: skip


PROBE = Probe(
    processor="a processor", cores=2, took_s=12.0, load=0.1, missing=("the disk: it is full",),
    figures=(
        figure("l1_latency_s", Unit.SECONDS, 1e-9, 1.1e-9),
        figure("memory_latency_s", Unit.SECONDS, 240e-9, 600e-9, 700e-9),
        figure("l3_latency_s", Unit.SECONDS, why_not="there is none"),
        figure("memory_copy_bytes_per_s", Unit.BYTES, 50e9),
        figure("disk_reads_per_s", Unit.COUNT, 35_678.0),
        figure("vector_fp32_op_per_s", Unit.OPERATIONS, 1.5e12),
    ),
    curve=tuple(LatencyOfSize(num_bytes=4096 << i, latency_s=1e-9 * 2**i) for i in range(6)),
)  # fmt: skip


def test_table_compares_figures_to_the_textbook() -> None:
    text = "\n".join(render_probe(PROBE))
    rows = {line.split("  ")[0]: line for line in text.splitlines()}
    assert "x 0.67" in rows["l1 latency s"]  # 1 ns beside 1.5 ns
    assert "x 2" in rows["memory latency s"]  # 240 ns beside at most 120 ns
    assert "~600 ns" in rows["memory latency s"]
    assert "inside" in rows["memory copy bytes per s"]
    assert "1.5 Top/s" in text
    assert "35,700 /s" in text
    assert "l3 latency s: there is none" in text
    assert "the disk: it is full" in text
    assert "other programs were running" not in text
    assert "other programs were running" in "\n".join(render_probe(replace(PROBE, load=1.5)))


def test_plot_has_every_figure_and_the_curve() -> None:
    root = ElementTree.fromstring(draw_probe(PROBE))
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"l1 latency s", "vector fp32 op per s", "disk reads per s"} < set(texts)
    assert len(list(root.iter("{http://www.w3.org/2000/svg}polyline"))) == 1


def test_textbook_values_have_the_unit_of_their_figure() -> None:
    for key, (low, high) in TEXTBOOK.items():
        assert 0 < low <= high
        assert any(key.endswith(f"_{unit.value}") for unit in Unit)


def test_best_values_are_kept_and_missing_ones_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert "paceline probe" in read_machine().why_not
    keep(PROBE)
    known = read_machine()
    assert known.get("memory_latency_s") == 240e-9
    assert known.get("l3_latency_s") is None
    assert known.source.startswith("paceline probe, 2")


def test_other_figures_are_measured_without_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(probing, "matmul_figures", lambda device: iter(()))
    result = probe_machine(ProbeQuestion(folder=tmp_path), lambda line: None)
    assert "no C++ compiler" in result.missing[0]
    assert {one.group for one in result.figures} >= {Group.SOFTWARE}


def test_matrix_products_are_measured_in_every_format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.probe.rates._SIDES", (64,))
    monkeypatch.setattr("paceline.probe.rates._PRODUCT_S", 0.01)
    results = {one.key: one for one in matmul_figures(torch.device("cpu"))}
    assert len(results) == 5
    assert all(result.samples or result.why_not for result in results.values())
    assert (results["matmul_fp32_op_per_s"].best or 0) > 0


def test_device_figures_are_measured_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an accelerator the device code runs on the CPU, where nothing can be pinned."""
    for name in ("_BYTES", "_MEMORY_BYTES"):
        monkeypatch.setattr(f"paceline.probe.devices.{name}", 1 << 16)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 0)
    results = {one.key: one for one in device_figures(torch.device("cpu"))}
    assert (results["to_device_pageable_bytes_per_s"].best or 0) > 0
    assert (results["device_launch_s"].best or 0) > 0
    assert all(result.samples or result.why_not for result in results.values())


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        ("--folder nowhere", 2, "--folder nowhere is not a folder"),
        ("--plot nowhere/probe.svg", 2, "cannot be written: nowhere is not a folder"),
        ("--picture nowhere/probe.svg", 2, "cannot be written: nowhere is not a folder"),
        ("--serve 0 --json", 2, "--serve only answers probes: use it without other flags"),
        ("--serve 0 --peer there", 2, "--serve only answers probes: use it without other flags"),
        ("--peer there:x", 2, "--peer must be HOST or HOST:PORT, got 'there:x'"),
        ("--peer 10..0.7", 1, "10..0.7 is not a valid host name"),
        ("--peer no-such-host.invalid", 1, "unknown host no-such-host.invalid"),
    ],
)
def test_invalid_options_are_refused_before_measuring(
    say: Callable[[str], tuple[int, str, str]], flags: str, code: int, said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(probing, "probe_machine", None)
    result, _, err = say(f"probe {flags}")
    assert result == code
    assert said in err
