"""Which member adds, finishes and takes over: one order of jobs, whichever member dies."""

import pytest

from paceline.core.jobs import Jobs, Payload, makes_border
from paceline.errors import ConfigError, ProtocolError
from paceline.events import Apply, EpochEnd, Pushed, Ticket
from paceline.store.clip import UNCLIPPED, Clip
from paceline.wire.messages import FOUND_INF, Add, Copy, Finish, Job, Skip


class Played:
    """Jobs of two members on seats 0 and 1, and the messages sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, Job]] = []
        self.num_done = 0
        self.jobs = Jobs(
            lambda member, job: self.sent.append((member, job)),
            {5: 0, 6: 1},
            lambda: self.num_done,
            samples_per_update=8,
        )

    def push(
        self,
        member: int,
        orders: list[Apply | EpochEnd],
        fault: int = 0,
        *,
        stepped: int = 0,
        clip: Clip = UNCLIPPED,
        steps_again: bool = False,
    ) -> None:
        pushed = Pushed(Ticket(member, 0, 0), 4, 1.0, True, 0.0)
        self.jobs.settle(orders, pushed, Payload(fault, clip, stepped, steps_again))


BOTH = Apply((Ticket(5, 0, 0), Ticket(6, 0, 0)), (0.5, 0.5))


def test_each_member_adds_its_push_and_the_last_one_finishes() -> None:
    played = Played()
    played.push(5, [])
    played.push(6, [BOTH])
    assert played.sent == [
        (5, Add(1, 0, 0.5, 1.0, True)),
        (6, Add(2, 1, 0.5, 1.0, False)),
        (6, Finish(3, 1, -1, 1.0, UNCLIPPED)),
    ]


def test_an_update_of_one_push_is_finished_from_its_slot() -> None:
    played = Played()
    played.push(5, [Apply((Ticket(5, 0, 0),), (1.0,))])
    assert played.sent == [(5, Finish(1, 1, 0, 1.0, UNCLIPPED))]


def test_undone_jobs_of_a_dead_member_are_reassigned_in_order() -> None:
    played = Played()
    played.push(5, [])
    played.push(6, [BOTH])
    played.num_done, played.sent = 1, []
    assert played.jobs.is_held_by(6)
    played.jobs.left(6)
    assert [(member, job.job) for member, job in played.sent] == [(5, 2), (5, 3)]
    with pytest.raises(ProtocolError, match="no member is alive to do it"):
        played.jobs.left(5)


def test_an_overflowed_push_skips_its_update() -> None:
    played = Played()
    played.push(5, [])
    played.push(6, [BOTH], FOUND_INF)
    assert played.sent[-1] == (6, Skip(2, 1, 0))


def test_an_update_of_pushes_that_were_not_summed_is_refused() -> None:
    played = Played()
    played.push(5, [])
    with pytest.raises(ProtocolError, match="were summed"):
        played.jobs.settle([BOTH], None, None)


def test_a_copy_waits_for_a_step_boundary_inside_an_epoch() -> None:
    played = Played()
    played.jobs.ask_copy(3)
    alone = Apply((Ticket(5, 0, 0),), (1.0,))
    assert not makes_border([alone, EpochEnd(0, 0.0)])
    played.push(5, [alone])
    assert played.sent[-1] == (5, Copy(2, 3))


def test_a_copy_is_not_made_between_two_steps_on_a_batch() -> None:
    played = Played()
    played.jobs.ask_copy(3)
    alone = Apply((Ticket(5, 0, 0),), (1.0,))
    played.push(5, [alone], steps_again=True)
    assert not any(isinstance(job, Copy) for _, job in played.sent)
    played.push(5, [alone])
    assert played.sent[-1] == (5, Copy(3, 3))


def test_each_optimizers_mean_is_over_the_pushes_that_stepped_it() -> None:
    played = Played()
    played.push(5, [], stepped=0b11)
    played.push(6, [BOTH], stepped=0b10)
    assert played.sent[-1] == (6, Finish(3, 1, -1, 1.0, UNCLIPPED, (2.0, 1.0)))
    played.push(5, [], stepped=0b11)
    played.push(6, [BOTH], stepped=0b11)
    assert played.sent[-1] == (6, Finish(6, 2, -1, 1.0, UNCLIPPED))


def test_steps_of_different_optimizers_cannot_be_clipped_together() -> None:
    played = Played()
    played.push(5, [], stepped=0b11, clip=Clip(1.0))
    with pytest.raises(ConfigError, match="steps of different optimizers, but it is clipped"):
        played.push(6, [BOTH], stepped=0b10, clip=Clip(1.0))
