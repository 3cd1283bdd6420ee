"""The trace is read back as written, and damage is named."""

import errno
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.events import (
    Apply,
    Cancel,
    Discard,
    EpochEnd,
    Grant,
    Joined,
    Late,
    Lease,
    Left,
    Order,
    Pushed,
    Stalled,
    Ticket,
)
from paceline.run.faults import limit_files
from paceline.trace import Trace, read_header, read_trace, writer
from paceline.trace.records import (
    Ended,
    Evaluated,
    Handed,
    Header,
    Heard,
    Logged,
    Noted,
    Ordered,
    SupersededRecord,
)
from resealing import reseal

TICKET = Ticket(3, 14, 15)
ORDERS: tuple[Order, ...] = (
    Apply((TICKET, Ticket(1, 2, 3)), (0.1, 0.9)),
    Discard(TICKET),
    Cancel(3),
    Grant(TICKET, (Lease(1, 0, 0, 64), Lease(2, 0, 64, 128)), (Lease(3, 0, 128, 192),)),
    Grant(TICKET, ()),
    Late(TICKET),
    EpochEnd(4, 1175),
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


def test_written_records_are_read_back(path: Path) -> None:
    trace = Trace(path)
    push = Pushed(TICKET, 64, 0.1 + 0.2, True, 1 / 3)
    trace.header(task="lenet", workers=2, learning_rates=[0.2])
    trace.joined(0.5, 3, 1, 4711)
    trace.pushed(push, 0.02, 0.01, 0.005)
    for order in ORDERS:
        trace.order(order, 1.5)
    trace.superseded(1.6, 3, 15, 0.01, 0.03)
    trace.stalled(1.7, 3)
    trace.left(1.8, 3, "killed by signal 9")
    trace.evaluated(2.0, 0, 235, {"acc": (8300.0, 10000.0)})
    trace.log(2.1, 0, {"lr": 0.2})
    trace.note(2.2, 'a "quoted" note')
    trace.end(2.3, "finished")
    trace.close()
    records = list(read_trace(path))
    header = records[0]
    assert isinstance(header, Header)
    assert (header.text("task"), header.number("workers")) == ("lenet", 2)
    assert header.texts("learning_rates") == ("0.2",)
    assert records[1:] == [
        Heard(fact=Joined(3, 0.5), worker=1, pid=4711),
        Handed(fact=push, compute_s=0.02, wait_s=0.01, push_s=0.005),
        *(Ordered(t_s=1.5, order=order) for order in ORDERS),
        SupersededRecord(t_s=1.6, ticket=Ticket(3, 15, -1), wasted_s=0.01, saved_s=0.03),
        Heard(fact=Stalled(3, 1.7)),
        Heard(fact=Left(3, 1.8), reason="killed by signal 9"),
        Evaluated(t_s=2.0, epoch=0, version=235, totals={"acc": (8300.0, 10000.0)}),
        Logged(t_s=2.1, member=0, values={"lr": 0.2}),
        Noted(t_s=2.2, text='a "quoted" note'),
        Ended(t_s=2.3, reason="finished"),
    ]


@given(
    loss=st.floats(allow_nan=False, allow_infinity=False),
    at_s=st.floats(0, 1e9),
    is_finite=st.booleans(),
)
def test_a_push_keeps_its_numbers_bit_for_bit(
    loss: float, at_s: float, is_finite: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    fact = Pushed(TICKET, 7, loss, is_finite, at_s)
    trace = Trace(path)
    trace.header()
    trace.pushed(fact, 0.0, 0.0, 0.0)
    trace.close()
    record = list(read_trace(path))[1]
    assert isinstance(record, Handed)
    assert record.fact == fact


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_non_finite_loss_is_written_as_null_to_keep_lines_valid_json(
    loss: float, path: Path
) -> None:
    trace = Trace(path)
    trace.header()
    trace.pushed(Pushed(TICKET, 1, loss, False, 0.0), 0.0, 0.0, 0.0)
    trace.log(0.0, 0, {"norm": loss})
    trace.evaluated(0.0, 0, 1, {"loss": (loss, 1.0)})
    trace.close()

    def refuse(word: str) -> float:
        raise AssertionError(f"{word} is no JSON")

    lines = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    assert lines[1]["loss"] is None
    record = list(read_trace(path))[1]
    assert isinstance(record, Handed)
    assert math.isnan(record.fact.loss)


def test_every_line_begins_with_its_kind(path: Path) -> None:
    trace = Trace(path)
    trace.header(task="mlp")
    for order in ORDERS:
        trace.order(order, 0.0)
    trace.close()
    assert all(next(iter(json.loads(line))) == "kind" for line in path.read_text().splitlines())


def write_three(path: Path) -> list[str]:
    trace = Trace(path)
    trace.header(task="mlp")
    trace.note(0.1, "one")
    trace.note(0.2, "two")
    trace.close()
    return path.read_text().splitlines(keepends=True)


def test_a_truncated_last_line_is_left_out(path: Path) -> None:
    lines = write_three(path)
    for cut in range(1, len(lines[2])):
        path.write_text("".join(lines)[:-cut])
        assert len(list(read_trace(path))) == 2


@pytest.mark.parametrize(
    "damage",
    ["{broken\n", '{"kind":"note","t":0.1}\n', '{"kind":"dance","t":1}\n', "[]\n", "\n"],
)
def test_other_damage_is_an_error_that_names_the_line(damage: str, path: Path) -> None:
    lines = write_three(path)
    for text in (lines[0] + damage + lines[2], reseal(lines[0] + damage + lines[2])):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"damaged at .*trace\.jsonl:2 .*head -n 1"):
            list(read_trace(path))


def test_of_a_trace_damaged_at_its_start_nothing_is_offered(path: Path) -> None:
    path.write_text("{broken\n")
    with pytest.raises(ConfigError, match=r"trace\.jsonl:1 .*nothing of it can be read$"):
        list(read_trace(path))


@pytest.mark.parametrize("order", [(0, 2, 1), (0, 2), (0, 1, 1, 2), (1, 2)])
def test_a_moved_lost_or_repeated_line_is_found_by_its_checksum(
    order: tuple[int, ...], path: Path
) -> None:
    lines = write_three(path)
    path.write_text("".join(lines[i] for i in order))
    with pytest.raises(ConfigError, match="its checksum is wrong: this line, or one before it"):
        list(read_trace(path))


def test_a_changed_digit_is_found_by_the_checksum(path: Path) -> None:
    lines = write_three(path)
    path.write_text(lines[0] + lines[1].replace('"t":', '"t":1', 1) + lines[2])
    with pytest.raises(ConfigError, match=r"trace\.jsonl:2 \(ValueError: its checksum is wrong"):
        list(read_trace(path))


@pytest.mark.parametrize(
    ("number", "remedy"), [(99, "update paceline"), (1, "read it with the paceline that wrote it")]
)
def test_another_format_is_refused(number: int, remedy: str, path: Path) -> None:
    path.write_text(f'{{"kind":"run","format":{number}}}\n')
    with pytest.raises(ConfigError, match=f"has format {number}, this paceline reads 3: {remedy}"):
        list(read_trace(path))


def test_a_file_that_is_not_a_trace_is_refused(path: Path) -> None:
    path.write_text(reseal('{"kind":"note","t":0.1,"text":"hello"}\n'))
    with pytest.raises(ConfigError, match="is not a trace: its first line is not a header"):
        list(read_trace(path))


@pytest.mark.parametrize("size", [100, 70_000, 65_536, 131_072, 200_001])
@pytest.mark.parametrize("line", [40, 30_000])
def test_records_kept_during_a_full_disk_are_written_later(
    size: int, line: int, path: Path
) -> None:
    trace = Trace(path)
    trace.header(workers=1)
    limit_files(size)
    try:
        for number in range(400_000 // line):
            trace.note(0.0, "x" * line)
            if number % 7 == 0:
                trace.flush()
        trace.flush()
        assert trace.trouble == "File too large"
        with pytest.raises(OSError, match="the trace cannot be written: File too large"):
            trace.mark()
    finally:
        limit_files(None)
    assert trace.mark() == path.stat().st_size
    assert trace.trouble == ""
    trace.end(2.0, "whole")
    trace.close()
    assert len(list(read_trace(path))) == 400_000 // line + 2


@pytest.mark.parametrize("size", [100, 65_536, 200_001])
def test_a_disk_that_stays_full_leaves_complete_lines(
    size: int, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "_MOST_WAITING_BYTES", 1 << 17)
    trace = Trace(path)
    trace.header(workers=1)
    limit_files(size)
    try:
        for _ in range(8000):
            trace.note(0.0, "x" * 40)
        trace.flush()
        assert trace.is_cut
        at_bytes = trace.mark()
    finally:
        limit_files(None)
    trace.note(1.0, "too late")
    trace.close()
    assert path.stat().st_size == at_bytes <= size
    results = list(read_trace(path)) if at_bytes else []
    assert all(isinstance(result, Header) or result.text == "x" * 40 for result in results)  # type: ignore[union-attr]


def test_a_deleted_file_is_written_anew(path: Path) -> None:
    trace = Trace(path)
    trace.header(workers=1)
    trace.note(0.0, "before")
    trace.flush()
    trace.note(0.1, "not written yet")
    path.unlink()
    assert trace.mark() == path.stat().st_size
    trace.note(0.2, "after")
    path.unlink()
    trace.end(0.3, "whole")
    trace.close()
    assert len(list(read_trace(path))) == 5


def test_a_copy_includes_waiting_records(path: Path) -> None:
    trace = Trace(path)
    trace.header(workers=1)
    trace.flush()
    trace.note(0.1, "waits")
    assert trace.copy(path.with_name("other")) == path.with_name("other").stat().st_size
    assert len(list(read_trace(path.with_name("other")))) == 2
    trace.close()


def test_a_missing_trace_is_named(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trace\.jsonl cannot be read: No such file"):
        list(read_trace(path))


def test_a_deleted_file_on_a_full_disk_is_written_anew_later(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = Trace(path)
    trace.header(task="lenet")
    path.unlink()

    def is_full(other: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as here:
        here.setattr(trace, "_copy_to", is_full)
        with pytest.raises(OSError, match="No space"):
            trace.mark()
    assert not path.exists()
    trace.mark()
    assert read_header(path).text("task") == "lenet"
