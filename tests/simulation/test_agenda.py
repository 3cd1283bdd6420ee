"""The next event in virtual time, from the agenda itself: no protocol, no run."""

import pytest

from paceline.conditions.delays import parse_delay
from paceline.conditions.world import Absence, Conditions
from paceline.errors import ConfigError
from paceline.events import Ticket
from paceline.simulation.agenda import Agenda, AgendaChange

EACH_S = Conditions(delays=(parse_delay("1s"), parse_delay("3s")))


def started_agenda(conditions: Conditions) -> Agenda:
    """An agenda with two workers, each at work on one step."""
    agenda = Agenda(conditions)
    for _ in range(2):
        at_s, what = agenda.next()
        assert isinstance(what, AgendaChange)
        agenda.join(what.worker, at_s)
    agenda.begin([Ticket(0, 0, 0), Ticket(1, 0, 0)], [1, 1], 0.0)
    return agenda


def test_pushes_arrive_in_time_order() -> None:
    agenda = started_agenda(EACH_S)
    assert agenda.next() == (1.0, Ticket(0, 0, 0))
    assert agenda.end(0, 1.0) == 1.0
    agenda.begin([Ticket(0, 1, 0)], [1], 1.0)
    assert [agenda.next()[0], agenda.next()[0]] == [2.0, 3.0]


def test_cancelled_push_never_arrives() -> None:
    agenda = started_agenda(EACH_S)
    assert agenda.end(0, 0.25, is_called_off=True) == 0.25
    assert agenda.next() == (3.0, Ticket(1, 0, 0))


def test_absent_worker_is_not_counted_as_present() -> None:
    agenda = started_agenda(EACH_S)
    agenda.end(1, 0.5, is_called_off=True)
    agenda.leave(1, 0.5)
    assert agenda.seconds_there(2.0) == 2.5


def test_error_says_when_all_workers_are_gone() -> None:
    agenda = Agenda(
        Conditions(
            delays=(parse_delay("1s"),), absences=(Absence(worker=0, from_s=5.0, until_s=6.0),)
        )
    )
    assert [agenda.next()[0] for _ in range(3)] == [0.0, 5.0, 6.0]
    with pytest.raises(ConfigError, match="all workers are gone and none returns"):
        agenda.next()
