"""What a worker's end comes to: which errors of its script are told, and which are none."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.context import Context
from paceline.engines.base import MemberSpec
from paceline.engines.local import process
from paceline.wire.channel import member_channel, socket_pair
from paceline.wire.messages import Done, Failed


class Told:
    """A channel that keeps what was said."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.send = self.hold = self.sent.append


@pytest.fixture
def spec(tmp_path: Path) -> MemberSpec:
    """Of the only worker, whose logs lie here."""
    return MemberSpec(
        member=0, seat=0, num_seats=1, threads=1, log=str(tmp_path / "logs" / "worker-0.log"),
        context=Context().write(), environment={},
    )  # fmt: skip


def end_with(error: BaseException, spec: MemberSpec, **exchange: Any) -> tuple[int, list[Any]]:
    """The exit code where the script raises this, and what is told."""
    told: Any = Told()
    seen: Any = SimpleNamespace(is_cut_short=False, say=told.send)
    vars(seen).update(exchange)
    try:
        raise error
    except BaseException as raised:  # any end
        return process.tell_end(raised, told, spec, seen), told.sent


@pytest.mark.parametrize("kind", [BrokenPipeError, ConnectionResetError])
def test_a_scripts_own_lost_connection_is_told(spec: MemberSpec, kind: type[OSError]) -> None:
    """Of a data set over HTTP, or of a program that it writes to."""
    code, (told,) = end_with(kind("of its own"), spec)
    assert code == 1
    assert isinstance(told, Failed)
    assert f"{kind.__name__}: of its own" in told.text


@pytest.mark.parametrize("says", [True, False], ids=["says", "hears"])
def test_whose_coordinator_is_gone_tells_nobody(spec: MemberSpec, says: bool) -> None:
    ours, theirs = socket_pair()
    channel = member_channel(ours)
    theirs.close()
    with pytest.raises(ConnectionError) as gone:
        channel.send(Done()) if says else channel.receive()
    assert end_with(gone.value, spec) == (1, [])
