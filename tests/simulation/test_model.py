"""The model of a run: its versions, evaluations, and averages of peers."""

import torch

from paceline.conditions.delays import parse_delay
from paceline.conditions.world import Conditions
from paceline.core.ledger import Ledger
from paceline.events import Pushed, Ticket
from paceline.protocols import parse
from paceline.simulation.engine import SimulatedRun
from paceline.simulation.model import Versions, examine, first_samples
from paceline.simulation.peers import PeersWork
from paceline.simulation.replay import pulled_versions
from paceline.trace.records import Handed
from reference import differ, state_of
from tiny import BATCH_SIZE, TASK, WIDTH, WITH_BATCH_NORM, samples


def test_old_version_is_kept_while_held() -> None:
    protocol = parse("full-sync", 2)
    store = PeersWork(TASK, protocol, num_workers=2, batch_size=BATCH_SIZE).store
    versions = Versions(store, torch.zeros(8, dtype=torch.uint8), is_pure=True)
    versions.keep()
    assert versions.most_kept == 0, "nobody holds it"
    versions.hold(0)
    versions.hold(0)
    versions.keep()
    versions.release(0)
    assert (versions.most_kept, versions.num_held) == (1, 1)
    versions.release(0)
    assert versions.num_held == 0


def test_evaluation_covers_all_data() -> None:
    test = samples().test
    model = TASK.model().train()
    assert {count for _, count in examine(TASK, model, test).values()} == {17}
    assert model.training, "as it was before"
    assert examine(TASK, model, None) == {}
    inputs, targets = first_samples(test, 5)
    assert (inputs.shape, targets.shape) == ((5, WIDTH), (5,))


def test_peers_average_equals_the_sum_of_the_store() -> None:
    states = []
    for path in ("store", "peers"):
        protocol = parse("full-sync", 2)
        work = PeersWork(WITH_BATCH_NORM, protocol, num_workers=2, batch_size=BATCH_SIZE)
        work.go_by(path)
        ledger = Ledger(work.num_samples, BATCH_SIZE, protocol.num_pushes)
        conditions = Conditions(delays=(parse_delay("exp:1s"),) * 2)
        SimulatedRun(protocol, ledger, conditions, work=work).run(8)
        work.load_newest()
        states.append(state_of(work.model))
    assert differ(*states) < 1e-12


def test_push_names_the_version_it_was_computed_at() -> None:
    pushed = Pushed(Ticket(1, 4, 7), 8, 0.5, True, 2.0)
    handed = Handed(fact=pushed, compute_s=1.0, wait_s=0.0, push_s=0.1)
    assert pulled_versions([handed]) == {(1, 4): 7}
