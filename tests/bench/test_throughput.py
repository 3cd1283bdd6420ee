"""Throughput: rows until memory is exhausted, merged tables, days, and a plot."""

import dataclasses
import doctest
import json
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.bench import throughput
from paceline.bench.throughput import (
    ThroughputQuestion,
    ThroughputRow,
    crossings,
    draw_throughput,
    merged,
    render_throughput,
    sweep,
    to_json,
)
from paceline.errors import ConfigError
from paceline.machine.ceilings import write_machine
from paceline.system.processors import num_cores

Say = Callable[[str], tuple[int, str, str]]


def row(device: str, batch_size: int, images_per_s: float, machine: str = "a") -> ThroughputRow:
    return ThroughputRow(
        machine=machine, device=device, model="lenet", precision="fp32", batch_size=batch_size,
        images_per_s=images_per_s, least_per_s=images_per_s, most_per_s=images_per_s, peak_bytes=1,
    )  # fmt: skip


def test_doctests_pass() -> None:
    assert doctest.testmod(throughput).failed == 0


def test_crossing_of_two_devices_is_reported() -> None:
    rows = [row("cpu", 1, 10), row("cpu", 16, 20), row("cuda:0", 1, 5), row("cuda:0", 16, 90)]
    assert crossings(rows) == ["lenet fp32: cuda:0 is ahead of the CPU from batch 16 on"]


def test_device_out_of_memory_is_not_counted_as_slower() -> None:
    ended = dataclasses.replace(row("cuda:0", 16, 1), images_per_s=None, ended="memory ends")
    rows = [row("cpu", 1, 10), row("cpu", 16, 20), row("cuda:0", 1, 100), ended]
    assert crossings(rows) == ["lenet fp32: cuda:0 is ahead of the CPU from batch 1 on"]


def test_temporary_lead_is_not_a_crossing() -> None:
    rows = [row("cpu", 1, 10), row("cpu", 16, 20), row("cuda:0", 1, 15), row("cuda:0", 16, 9)]
    assert crossings(rows) == ["lenet fp32: cuda:0 is ahead of the CPU at no large batch measured"]


def test_devices_of_different_machines_are_not_compared() -> None:
    rows = [
        row("cpu", 1, 10),
        row("cuda:0", 1, 20),
        row("cpu", 1, 99, "b"),
        row("cuda:0", 4, 1, "b"),
    ]
    assert crossings(rows) == ["lenet fp32 on a: cuda:0 is ahead of the CPU from batch 1 on"]
    text = "\n".join(render_throughput(rows, 1000, 1))
    assert "lenet on cpu of b" in text


def test_tables_of_several_machines_are_merged(tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text(json.dumps(to_json([row("cpu", 1, 7, "b"), row("cpu", 4, 8, "a")])))
    rows = merged([other], [row("cpu", 4, 9, "a")])
    speeds = {(one.machine, one.batch_size): one.images_per_s for one in rows}
    assert speeds == {("b", 1): 7, ("a", 4): 9}  # the new measurement wins
    assert render_throughput(rows, 1000, 1)[0].startswith("machine")
    other.write_text("{}")
    with pytest.raises(ConfigError, match="is no table of paceline bench throughput"):
        merged([other], [])


def test_plot_is_xml_with_one_line_per_series() -> None:
    rows = [row("cpu", 1, 10), row("cpu", 16, 20), row("cuda:0", 1, 5), row("cuda:0", 16, 90)]
    root = ET.fromstring(draw_throughput(rows))
    assert len(root.findall("{http://www.w3.org/2000/svg}polyline")) == 2


@pytest.mark.timeout(600)
def test_column_ends_when_memory_is_exhausted() -> None:
    question = ThroughputQuestion(
        models=("lenet",), batch_sizes=(4, 16, 100_000, 200_000), seconds=0.1,
        limit_bytes=300 * 2**20,
    )  # fmt: skip
    messages: list[str] = []
    rows = sweep(question, "a", messages.append)
    assert [one.batch_size for one in rows] == [4, 16, 100_000]
    assert "memory ends" in rows[-1].ended
    for one in rows[:2]:
        assert one.images_per_s is not None
        assert one.least_per_s is not None
        assert one.most_per_s is not None
        assert one.least_per_s <= one.images_per_s <= one.most_per_s
    assert "memory ends" in messages[-1]


@pytest.mark.timeout(600)
def test_bench_throughput_prints_a_table_and_plots(say: Say, tmp_path: Path) -> None:
    line = "bench throughput softmax --batch-sizes 8,32 --seconds 0.1 --device cpu --plot a.svg"
    code, out, err = say(line)
    assert code == 0, err
    assert "images/s" in out
    assert "2,500,000 images x 90 epochs take" in out
    assert (tmp_path / "a.svg").read_text().startswith("<svg")
    assert say(line.replace("8,32", "8,x"))[0] == 2
    assert say(f"{line} --precision fp8")[0] == 2
    assert say(line.replace("softmax", "softmx"))[0] == 2
    code, _, err = say(line.replace("a.svg", "nowhere/a.svg"))
    assert (code, "nowhere is not a folder" in err) == (2, True)


def test_tables_can_be_merged_without_measuring(say: Say, tmp_path: Path) -> None:
    (tmp_path / "b.json").write_text(json.dumps(to_json([row("cpu", 1, 7, "b")])))
    code, out, err = say("bench throughput --merge b.json --json")
    assert code == 0, err
    assert [one["machine"] for one in json.loads(out)["rows"]] == ["b"]
    code, _, err = say("bench throughput --merge b.json --precision bf16")
    assert (code, "measures nothing here" in err) == (2, True)


def test_throughput_is_compared_to_the_ceiling_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    write_machine({"matmul_fp32_op_per_s": 1e15})
    question = ThroughputQuestion(
        models=("mlp",), batch_sizes=(64,), seconds=0.05, threads=num_cores()
    )
    (result,) = sweep(question, "here", lambda said: None)
    assert result.peak_share is not None
    assert 0 < result.peak_share < 1
    known = dataclasses.replace(result, peak_share=0.25)
    assert "at 25.0% of matrix products' rate there" in "\n".join(render_throughput([known], 1, 1))
    (other,) = sweep(
        dataclasses.replace(question, threads=num_cores() + 1), "here", lambda said: None
    )
    assert other.peak_share is None
    assert "matrix products" not in "\n".join(render_throughput([other], 1, 1))
