"""A small run, written by hand, whose numbers can be checked with a pencil."""

from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.events import Apply, Cancel, Discard, EpochEnd, Grant, Late, Lease, Pushed, Ticket
from paceline.trace import Trace


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Two workers, two epochs of 40 samples, three updates; one push late, one discarded.

    t    1.0     2.0     3.0  | 3.5 evaluated 4.0 |  5.0            6.0
    w0   #0 ----> apply (v0)  |                   |  #1 ----------> apply
    w1   #0 --------------> apply, one version late
    """
    write_run(tmp_path)
    return tmp_path


def write_run(folder: Path) -> None:
    trace = Trace(folder / "trace.jsonl")
    trace.header(
        task="lenet", protocol="async", workers=2, engine="local", path="store",
        device="cpu", num_samples=40, batch_size=20,
    )  # fmt: skip
    a, b = Lease(0, 0, 0, 20), Lease(1, 0, 20, 40)
    first, second, third = Ticket(0, 0, 0), Ticket(1, 0, 0), Ticket(0, 1, 2)
    trace.joined(0.5, 0, 0, 11)
    trace.joined(0.5, 1, 1, 12)
    trace.order(Grant(first, (a,)), 1.0)
    trace.order(Grant(second, (b,)), 1.0)
    trace.pushed(Pushed(first, 20, 2.0, True, 2.0), 0.8, 0.1, 0.1)
    trace.order(Apply((first,), (1.0,)), 2.0)
    trace.pushed(Pushed(second, 20, 1.0, True, 3.0), 1.5, 0.3, 0.2)
    trace.order(Apply((second,), (1.0,)), 3.0)
    trace.order(EpochEnd(0, 2), 3.5)
    trace.evaluated(4.0, 0, 2, {"acc": (6.0, 10.0), "loss": (12.0, 10.0)})
    trace.order(Grant(third, (Lease(2, 1, 0, 20),)), 5.0)
    trace.order(Grant(Ticket(1, 1, 2), (Lease(3, 1, 20, 40),)), 5.0)
    trace.order(Cancel(1), 5.5)
    trace.superseded(5.5, 1, 1, 0.25, 0.75)
    trace.pushed(Pushed(Ticket(1, 1, 2), 20, 9.0, True, 5.6), 0.0, 0.0, 0.0)
    trace.order(Late(Ticket(1, 1, 2)), 5.6)
    trace.pushed(Pushed(third, 20, 0.5, True, 6.0), 0.9, 0.1, 0.0)
    trace.order(Apply((third,), (1.0,)), 6.0)
    trace.pushed(Pushed(Ticket(0, 2, 3), 20, 0.4, True, 6.5), 0.5, 0.0, 0.0)
    trace.order(Discard(Ticket(0, 2, 3)), 6.5)
    trace.order(EpochEnd(1, 3), 7.0)
    trace.evaluated(7.5, 1, 3, {"acc": (8.0, 10.0), "loss": (4.0, 10.0)})
    trace.end(8.0, "finished")
    trace.close()


@pytest.fixture
def cut(run_dir: Path) -> Callable[[int], None]:
    """Keep the first lines of the trace, as if the machine had been switched off."""

    def keep(num_lines: int) -> None:
        path = run_dir / "trace.jsonl"
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:num_lines]))

    return keep
