"""What a user's stop does to workers that delay it."""

from types import SimpleNamespace
from typing import Any

from paceline.run.shutdown import Shutdown


def test_a_stop_probes_only_a_few_of_many_blocked_workers() -> None:
    """Each may take 0.6 s to answer, and the ten seconds are for all of them."""
    probed: list[int] = []
    ended: list[int] = []
    notes: list[str] = []

    def whereabouts(member: int) -> str:
        probed.append(member)
        return "it is at data.py:88 in load"

    live = [SimpleNamespace(number=number, seat=number, is_done=False) for number in range(40)]
    run: Any = SimpleNamespace(
        engine=SimpleNamespace(processes=object()),
        roster=SimpleNamespace(live=live),
        notes=SimpleNamespace(say=notes.append),
        processes=SimpleNamespace(whereabouts=whereabouts, end=ended.append),
        owes_stop=False,
    )
    shutdown = Shutdown(run, SimpleNamespace(by_peers=False), lambda member: True)  # type: ignore[arg-type]
    shutdown.asked(0.0)
    shutdown.tick(3.5)
    assert ended == list(range(40)), "all are ended at once"
    assert notes[0] == (
        "worker 0 has not stopped after 3.5 s: it is at data.py:88 in load; it is ended"
    )
    assert notes[3:] == ["37 more workers are ended"]
    shutdown.tick(7.5)
    assert shutdown.is_over
    assert len(probed) <= 6
