"""Sums of ranks over real gloo: small sums on one machine use a tree."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest

from forked import Forked
from paceline.engines.torchrun import group
from paceline.engines.torchrun.place import MeetingPlace
from paceline.engines.torchrun.world import RankOfWorld
from ranks import free_port

RANK = """
import os, sys, torch
from paceline.engines.torchrun import group
from paceline.engines.torchrun.place import MeetingPlace
from paceline.engines.torchrun.world import RankOfWorld

rank, size, port, is_near = map(int, sys.argv[1:])
torch.set_num_threads(1)
me = RankOfWorld(rank=rank, size=size, local_rank=rank, address="127.0.0.1", port=port)
ranks = group.RankGroup(MeetingPlace(me), me, lambda seat: None, is_near=bool(is_near))
by_gloo = []
own = type(ranks)._of

def noted(self, tensor):
    if sys._getframe(1).f_code.co_name == "all_reduce":
        by_gloo.append(tensor.nbytes)
    return own(self, tensor)

group.RankGroup._of = noted
small, large = torch.arange(1001.0) * (rank + 1), torch.ones(group._SMALL_BYTES // 4 + 1)
late, turned, whole = torch.ones(7), torch.full((2,), 1.0 + rank * 1j), torch.tensor([rank, 3])
begun = ranks.all_reduce(late)
ranks.all_reduce(small, at_once=True).wait()
ranks.all_reduce(large, at_once=True).wait()
ranks.all_reduce(turned, at_once=True).wait()
ranks.all_reduce(whole, is_maximum=True, at_once=True).wait()
begun.wait()
assert torch.equal(small, torch.arange(1001.0) * (size * (size + 1) // 2))
assert large.tolist() == [float(size)] * len(large)
assert late.tolist() == [float(size)] * 7
assert turned.tolist() == [size + 1j * size * (size - 1) / 2] * 2
assert whole.tolist() == [size - 1, 3]
print(by_gloo, flush=True)
assert ranks.leave()
os._exit(0)
"""


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("is_near", [True, False], ids=["one machine", "several"])
def test_a_small_sum_that_all_wait_for_uses_a_tree(
    tmp_path: Path, size: int, is_near: bool
) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    port = free_port()
    ranks = [
        Forked([tmp_path / "rank.py", rank, size, port, int(is_near)], cwd=tmp_path,
               stdout=PIPE, stderr=PIPE)
        for rank in range(size)
    ]  # fmt: skip
    for rank in ranks:
        out, err = rank.communicate(timeout=60)
        assert rank.returncode == 0, err
        late, large = 28, (1 << 20) + 4
        expected = [late, large] if is_near else [late, 4004, large, 16, 16]
        assert out.strip() == str(expected)


# -- machines that are gone -----------------------------------------------------------------------


class Silent(socket.socket):
    """A connection whose other end has stopped answering.

    The error is the kernel's, after a minute.
    """

    def recv(self, *_: Any) -> bytes:
        raise TimeoutError(110, "Connection timed out")


class Reset(socket.socket):
    """A connection whose other end's machine has restarted, and does not know it."""

    def recv(self, *_: Any) -> bytes:
        raise ConnectionResetError(104, "Connection reset by peer")


@pytest.mark.parametrize("kind", [Silent, Reset, socket.socket], ids=["gone", "restarted", "ended"])
def test_a_lost_machine_is_reported_and_a_closed_connection_is_not(
    monkeypatch: pytest.MonkeyPatch, kind: type[socket.socket]
) -> None:
    told: list[str] = []
    monkeypatch.setattr(group, "_REPORT_S", 0.0)
    pairs = {name: socket.socketpair() for name in ("place", "next")}
    links = iter([kind(fileno=end.detach()) for end, _ in pairs.values()])
    monkeypatch.setattr(group, "keep_alive", lambda link: None)
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: next(links))
    for _, other in pairs.values():
        other.close()
    group._watch_machines([(("", 0), lambda name=name: told.append(name)) for name in pairs])  # type: ignore[misc]  # of the loop's own name
    assert sorted(told) == ([] if kind is socket.socket else ["next", "place"])


def test_the_kernel_probes_silent_connections() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname(), timeout=1.0) as link,
    ):
        group.keep_alive(link)
        assert link.gettimeout() is None
        assert link.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        for name, value in group._KEEPALIVE.items():
            if hasattr(socket, name):
                assert link.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) == value


def test_ranks_of_several_machines_watch_the_next_one_and_the_meeting_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(group, "_own_address", lambda: "127.0.0.1")
    held, all_of_them = list[Any](), threading.Semaphore(0)

    def keep(link: socket.socket) -> None:
        held.append(link.getpeername())
        all_of_them.release()

    monkeypatch.setattr(group, "keep_alive", keep)
    port, told = free_port(), list[int]()
    ranks = [
        RankOfWorld(rank=seat, size=3, local_rank=0, address="127.0.0.1", port=port)
        for seat in range(3)
    ]
    place = MeetingPlace(ranks[0])
    with ThreadPoolExecutor(3) as pool:
        lines = list(
            pool.map(
                lambda rank: group.MachineKeepalives(place, rank, told.append, lambda: None), ranks
            )
        )
    assert all(all_of_them.acquire(timeout=10.0) for _ in range(6))
    servers = [line._server.getsockname() for line in lines]
    assert sorted(held) == sorted([*servers, *[("127.0.0.1", port)] * 3])
    for line in lines:
        line._server.close()  # its process has ended
    assert told == []
