"""The figures of a running run: the time left follows from usual updates, not from the start."""

from dataclasses import replace

import pytest

from paceline.config import RunSettings
from paceline.events import Apply
from paceline.plan import Plan
from paceline.report.live import Progress, QuietObserver
from paceline.run.progress import ProgressMeter
from paceline.run.roster import Roster

PLAN = Plan(
    task="tiny", source="made up", workers=2, device="cpu", engine="local", path="peers",
    protocol="full-sync", mini_batch_size=1, pushes_per_update=2, samples_per_update=2,
    updates_per_epoch=100, epochs=1, updates_total=100, lr=0.1, num_parameters=1, update_bytes=4,
    shared_bytes=4, grain="none needed",
)  # fmt: skip


class Told(QuietObserver):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[Progress] = []

    @property
    def etas(self) -> list[float | None]:
        return [progress.eta_s for progress in self.all]

    def progress(self, progress: Progress) -> None:
        self.all.append(progress)


def test_the_time_left_is_estimated_from_updates_after_the_first() -> None:
    told = Told()
    watch = ProgressMeter(PLAN, RunSettings(), Roster(), told)
    watch.opened(0.0, 0)
    for version, at_s in enumerate([30.0, 31.0, 32.0, 33.0], 1):  # the first one compiles
        watch.applied(Apply((), ()), version)
        watch.show(at_s)
    assert told.etas == [None, None, None, pytest.approx(96.0)]


def test_the_time_left_of_a_time_limit_is_known_from_the_start() -> None:
    told = Told()
    watch = ProgressMeter(
        replace(PLAN, updates_total=None), RunSettings(seconds=60.0), Roster(), told
    )
    watch.opened(0.0, 0)
    watch.show(1.0)
    assert told.etas == [59.0]


def test_a_worker_is_shown_with_what_it_did_in_all_its_lives() -> None:
    told, roster = Told(), Roster()
    watch = ProgressMeter(PLAN, RunSettings(), roster, told)
    watch.opened(0.0, 0)
    first, other = roster.join(0, 0, 11), roster.join(1, 1, 12)
    for entry, num in ((first, 3), (other, 4)):
        for _ in range(num):
            entry.count(10, 0.5, 0.25, 0.25, 0.0)
    first.is_alive = False
    roster.join(2, 0, 13).count(10, 1.5, 0.25, 0.25, 0.0)
    watch.show(4.0)
    (again, same) = told.all[0].workers
    assert (again.worker, again.pushes, again.state) == (0, 4, "training")
    assert again.samples_per_s == same.samples_per_s == 10.0
    assert again.compute_share == pytest.approx(0.6)
