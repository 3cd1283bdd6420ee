"""What a worker's end comes to: which errors of its script are told, and which are none."""

import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

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


def raised_by(code: str) -> Exception:
    """What this script ends with."""
    with pytest.raises(Exception) as raised:  # noqa: PT011  whichever
        exec(code, {"torch": torch, "statistics": statistics, "save": print})
    return raised.value


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


@pytest.mark.parametrize(
    "code",
    [
        "next(iter(()))", "[].pop()", "0 / len(())", "max([])", "statistics.mean([])",
        "torch.cat([])", "torch.stack([])", "list(next(iter(())) for _ in range(1))",
        "total = 0; total.item()", "for loss in (): pass\nprint(loss)",
        "def train():\n    for loss in (): pass\n    print(loss)\ntrain()",
    ],
)  # fmt: skip
def test_code_that_cannot_do_without_batches_may_end_so_behind_a_stop(
    spec: MemberSpec, code: str
) -> None:
    error = raised_by(code)
    assert end_with(error, spec)[0] == 1
    code_of_end, (note, told) = end_with(error, spec, is_cut_short=True)
    assert (code_of_end, told) == (0, Done())
    assert f"({type(error).__name__}): the run was stopped, so its loader had nothing" in note


@pytest.mark.parametrize(
    "code",
    [
        "torch.save({}, '/no/such/folder/model.pt')", "open('/no/such/file')", "{}['acc']",
        "model = 0; save(modle)", "None.item()", "int('one')",
        "torch.nn.Embedding(2, 2)(torch.tensor(9))",
    ],
)  # fmt: skip
def test_whatever_else_fails_behind_a_stop_is_a_failure(spec: MemberSpec, code: str) -> None:
    code_of_end, (told,) = end_with(raised_by(code), spec, is_cut_short=True)
    assert (code_of_end, type(told)) == (1, Failed)
    assert "before that the run was stopped" in told.text
