"""The fate of a sample, in runs with known steps; and in live runs, compared with what was used."""

import json
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from paceline.cli.app import run
from paceline.data.loader import LeasedLoader
from paceline.data.order import redraw
from paceline.errors import ConfigError
from paceline.events import Apply, EpochEnd, Grant, Joined, Lease, Pushed, Ticket
from paceline.report.whereabouts import Fates, report_sample
from paceline.trace import Trace, read_trace
from paceline.trace.records import Handed, Header, Heard, Ordered, Resumed
from runs import leases_of, train
from tiny import NUM_SAMPLES, TASK


def in_order(header: Header, epoch: int, num_samples: int) -> range:
    return range(num_samples)


def test_update_worker_and_staleness_of_a_sample_are_named(run_dir: Path) -> None:
    """Worker 1's push of the first epoch was applied one version late, see conftest.py."""
    first, second = report_sample(run_dir, 25, in_order).fates
    assert (first.update, first.worker, first.staleness_versions, first.tries) == (2, 1, 1, 1)
    assert second.update is None
    assert "cancelled" in second.reason
    assert "its push was late" in second.reason
    assert second.reason.endswith("dropped")


def test_the_ledgers_of_the_epochs_add_up(run_dir: Path) -> None:
    whole, half = report_sample(run_dir, 3, in_order).ledgers
    assert (whole.samples, whole.used, whole.dropped, whole.open, whole.twice) == (40, 40, 0, 0, 0)
    assert (half.samples, half.used, half.dropped, half.open, half.twice) == (40, 20, 20, 0, 0)


def test_a_dead_workers_sample_has_the_death_as_its_reason(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "trace.jsonl")
    trace.header(task="t", num_samples=8, seed=0)
    trace.joined(0.0, 0, 0, 1)
    trace.joined(0.0, 1, 1, 2)
    trace.order(Grant(Ticket(1, 0, 0), (Lease(0, 0, 0, 8),)), 1.0)
    trace.left(1.5, 1, "killed by signal 9")
    trace.close()
    (fate,) = report_sample(tmp_path, 5, in_order).fates
    assert fate.reason == "worker 1: killed by signal 9; the run ended before it was used"
    assert report_sample(tmp_path, 5, in_order).ledgers[0].open == 8


@pytest.mark.parametrize(("before", "behind"), [(1, 2), (2, 1)])
def test_a_run_resumed_with_other_workers_splits_its_batches_anew(
    tmp_path: Path, before: int, behind: int
) -> None:
    trace, ids = Trace(tmp_path / "trace.jsonl"), count()
    trace.header(task="t", num_samples=8, seed=0)

    def granted(workers: int, first: int) -> list[Ticket]:
        tickets, share = [Ticket(first + number, 0, 0) for number in range(workers)], 8 // workers
        for number, ticket in enumerate(tickets):
            trace.joined(0.0, ticket.member, number, 1)
            lease = Lease(next(ids), 0, number * share, (number + 1) * share)
            trace.order(Grant(ticket, (lease,), ()), 1.0)
        return tickets

    granted(before, 0)
    at = trace.mark()
    trace.close()
    trace = Trace(tmp_path / "trace.jsonl", goes_on=True)
    trace.go_on(at, 2.0, 0, behind, {"workers": behind})
    tickets = tuple(granted(behind, 10))
    trace.order(Apply(tickets, (1 / behind,) * behind), 3.0)
    trace.order(EpochEnd(0, 1), 3.0)
    trace.close()
    result = report_sample(tmp_path, 5, in_order)
    assert [(fate.update, fate.tries) for fate in result.fates] == [(1, 2)]
    assert [(ledger.used, ledger.dropped, ledger.twice) for ledger in result.ledgers] == [(8, 0, 0)]


@pytest.mark.parametrize("is_shuffled", [True, False])
def test_an_order_is_redrawn_as_the_members_drew_it(is_shuffled: bool) -> None:
    loader = DataLoader(list(range(50)), batch_size=7, shuffle=is_shuffled)  # type: ignore[arg-type]
    leased = LeasedLoader(loader, 5, torch.device("cpu"))
    for epoch in (0, 3):
        leased.order.draw(epoch)
        assert list(leased.order.indices) == list(redraw(leased.order.kind, 50, 5, epoch))


def test_a_custom_order_is_reported_as_such() -> None:
    generator = torch.Generator()
    loader = DataLoader(list(range(9)), shuffle=True, generator=generator)  # type: ignore[arg-type]
    assert LeasedLoader(loader, 5, torch.device("cpu")).order.kind == "own"
    with pytest.raises(ConfigError, match="--position N"):
        redraw("own", 9, 5, 0)


@pytest.mark.parametrize("protocol", ["full-sync", "k-batch-sync:2"])
def test_every_sample_of_a_live_run_has_the_update_that_used_it(
    tmp_path: Path, protocol: str
) -> None:
    fault = "kill worker 1 at update 3"
    trained = train(TASK, tmp_path, workers=2, protocol=protocol, fault=(fault,), delay=("50ms",))
    fates = Fates()
    for record in read_trace(trained.folder / "trace.jsonl"):
        fates.add(record)
    assert len(leases_of(trained.every_order())) > 10
    for epoch in sorted(fates.epochs):
        ledger = fates.ledger(epoch, NUM_SAMPLES)
        assert (ledger.used, ledger.dropped, ledger.twice) == (NUM_SAMPLES, 0, 0)
        updates = [fates.fate(epoch, position).update for position in range(NUM_SAMPLES)]
        assert None not in updates
    tried = [fates.fate(0, position) for position in range(NUM_SAMPLES)]
    assert any(fate.tries > 1 and fate.reason == "worker 1: killed by signal 9" for fate in tried)


def test_report_prints_the_fate_of_a_position(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["report", str(run_dir), "--position", "25"]) == 0
    text = capsys.readouterr().out
    assert "epoch 1, position 25: update 2, by worker 1, 1 version stale" in text
    assert "epoch   samples      used   dropped" in text
    assert run(["report", str(run_dir), "--position", "25", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fates"][0]["update"] == 2
    assert run(["report", str(run_dir), "--sample", "25"]) == 2
    assert "the script's own sampler" in capsys.readouterr().err


COUNTED = """\
import torch
import paceline
pace = paceline.connect()
model = torch.nn.Linear(2, 1)
model, optimizer = pace.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for _ in pace.updates(9):
    with pace.step():
        optimizer.zero_grad()
        model(torch.ones(4, 2)).sum().backward()
        optimizer.step()
"""


def test_a_number_of_a_loop_without_a_loader_is_found_by_its_position(
    say: Callable[[str], tuple[int, str, str]], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(COUNTED)
    assert say("launch --workers 2 --engine inline --device cpu --name n train.py")[0] == 0
    code, out, err = say("report runs/n --position 17")
    assert code == 0, err
    assert "epoch 1, position 17: update 9, by worker 1, fresh" in out
    code, _, err = say("report runs/n --position 18")
    assert code == 2
    assert "it has 18 samples, 0 to 17" in err


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2)])
def test_work_in_progress_at_a_stop_is_found_where_it_went(before: int, after: int) -> None:
    """16 samples, 8 an update; the second is started, stopped, and split anew for more or fewer."""
    fates, version = Fates(), 0
    fates.add(Header(fields={"num_samples": 16, "order": "shuffled"}))

    def granted(members: range, start: int, turn: int) -> list[Ticket]:
        size, tickets = 8 // len(members), []
        for place, member in enumerate(members):
            fates.add(Heard(fact=Joined(member, 0.0), worker=member))
            begin = start + place * size
            tickets.append(Ticket(member, turn, version))
            lease = Lease(100 * member + turn, 0, begin, begin + size)
            fates.add(Ordered(t_s=0.0, order=Grant(tickets[-1], (lease,), ())))
        return tickets

    def applied(tickets: list[Ticket]) -> None:
        for ticket in tickets:
            pushed = Pushed(ticket, 8 // len(tickets), 0.0, True, 0.0)
            fates.add(Handed(fact=pushed, compute_s=0.0, wait_s=0.0, push_s=0.0))
        weights = (1 / len(tickets),) * len(tickets)
        fates.add(Ordered(t_s=0.0, order=Apply(tuple(tickets), weights)))

    applied(granted(range(before), 0, 0))
    version = 1
    granted(range(before), 8, 1)
    fates.add(Resumed(t_s=1.0, version=1, workers=after, lost=0, changes={}))
    applied(granted(range(10, 10 + after), 8, 0))
    fates.add(Ordered(t_s=2.0, order=EpochEnd(0, 2)))
    assert [fates.fate(0, position).update for position in (0, 8, 11, 15)] == [1, 2, 2, 2]
    ledger = fates.ledger(0, 16)
    assert (ledger.used, ledger.dropped) == (16, 0)
