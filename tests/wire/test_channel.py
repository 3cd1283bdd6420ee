"""Messages between members and the coordinator: of any size, in order, whole."""

import os
import socket
import threading
from collections import deque

import pytest

from paceline.engines.local.switchboard import Switchboard
from paceline.errors import LinkError
from paceline.wire.channel import SocketChannel, coordinator_channel, member_channel, socket_pair
from paceline.wire.codec import WireError
from paceline.wire.messages import Adopt, AskStop, Extend, FromMember, LoopLeft, Note, ToMember

SIZE = SocketChannel.PIECE_BYTES


@pytest.mark.parametrize("num_bytes", [0, 1, SIZE - 40, SIZE, SIZE + 1, 5 * SIZE, 40 * SIZE])
@pytest.mark.parametrize("is_blocking", [True, False])
def test_a_message_of_any_size_arrives_whole(num_bytes: int, is_blocking: bool) -> None:
    ends = socket_pair()
    ours, theirs = member_channel(ends[0]), coordinator_channel(ends[1])
    sent: list[FromMember] = [Note("x" * num_bytes), Note("")]
    ours.hold(sent[0])
    sender = threading.Thread(target=ours.send, args=(sent[1],))
    sender.start()  # it waits where the other end does not read
    heard: list[FromMember] = []
    while not heard:
        heard = theirs.receive(is_blocking)
    sender.join(5.0)
    assert heard == sent


@pytest.mark.parametrize("over", range(-8, 9))
def test_a_message_that_ends_at_a_piece_boundary_arrives_whole(
    over: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SocketChannel, "PIECE_BYTES", 16)
    ends = socket_pair()
    ours, theirs = member_channel(ends[0]), coordinator_channel(ends[1])
    ours.send(Note("y" * (16 + over)))
    assert theirs.receive() == [Note("y" * (16 + over))]
    assert theirs.receive(False) == []


def test_a_missing_piece_is_awaited() -> None:
    ends = socket_pair()
    channel = member_channel(ends[0])
    ends[1].send(b"+" + b"[")
    assert channel.receive(False) == []
    ends[1].close()
    with pytest.raises(ConnectionResetError):
        channel.receive()


def test_a_member_that_does_not_read_delays_no_sender() -> None:
    """The coordinator does not wait for a stopped worker."""
    ours, theirs = socket_pair()
    channel, reader = coordinator_channel(ours), member_channel(theirs)
    sent = [Adopt(f"{number} " + "z" * 50_000) for number in range(100)]
    for message in sent:
        channel.send(message)
    assert channel.is_late
    assert not channel.send_rest()
    heard: list[ToMember] = []
    while len(heard) < len(sent):
        heard += reader.receive()
        channel.send_rest()
    assert heard == sent
    assert not channel.is_late


def test_a_message_of_the_other_direction_is_refused_as_damaged() -> None:
    """A message's number means another message in the other direction."""
    ends = socket_pair()
    member_channel(ends[0]).send(LoopLeft(3))
    with pytest.raises(WireError, match="is damaged"):
        member_channel(ends[1]).receive()


def test_threads_of_a_script_may_send_concurrently() -> None:
    """A thread that watches the machine logs while the loop pushes."""
    ours, theirs = socket_pair()
    member, coordinator = member_channel(ours), coordinator_channel(theirs)
    each = 4000
    heard: list[int] = []

    def send(first: int) -> None:
        for number in range(each):
            member.send(Extend(first + number))

    threads = [threading.Thread(target=send, args=[each * one]) for one in range(3)]
    for thread in threads:
        thread.start()
    while len(heard) < 3 * each:
        heard += [one.serial for one in coordinator.receive() if isinstance(one, Extend)]
    for thread in threads:
        thread.join()
    assert sorted(heard) == list(range(3 * each))
    for own in range(3):
        part = [number for number in heard if number // each == own]
        assert part == sorted(part)


@pytest.mark.parametrize("meanwhile", ["a thread holds", "a signal's handler sends"])
def test_messages_added_while_held_ones_are_sent_arrive_once(
    meanwhile: str,
) -> None:
    """A gradient's scale is held by the loop while a thread of the script logs."""
    ours, theirs = socket_pair()
    member, coordinator = member_channel(ours), coordinator_channel(theirs)
    is_thread = meanwhile == "a thread holds"

    class HeldMeanwhile(deque[FromMember]):
        """As the first is taken, something else comes."""

        def popleft(self) -> FromMember:
            first = super().popleft()
            if first == Note("early") and is_thread:
                late = threading.Thread(target=member.hold, args=(Note("late"),))
                late.start()
                late.join(5.0)
            elif first == Note("early"):
                member.send(Note("alarmed"))
            return first

    member._held = HeldMeanwhile([Note("early"), Note("then")])
    member.send(Note("sent"))
    member.send(Note("next"))
    received = [note.text for _ in range(2 + (not is_thread)) for note in coordinator.receive()]
    other = "late" if is_thread else "alarmed"
    assert sorted(received) == sorted(["early", "then", "sent", "next", other])


def test_a_piece_that_no_socket_accepts_is_reported() -> None:
    readable, _ = os.pipe()
    board = Switchboard(readable)
    ours, theirs = socket_pair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 15)
    board.open(0, ours)
    with pytest.raises(LinkError, match="sockets do not accept a message of"):
        board.send([(0, Adopt("x" * 200_000))])
    theirs.close()
    board.close()


def test_nothing_is_kept_of_a_member_that_has_ended() -> None:
    readable, _ = os.pipe()
    board = Switchboard(readable)
    before = len(os.listdir("/dev/fd"))
    for member in range(5):
        ours, theirs = socket_pair()
        board.open(member, ours)
        member_channel(theirs).send(AskStop())
        theirs.close()
        assert board.hang_up(member) == [(member, AskStop())]
        board.send([(member, Adopt("nobody hears it"))])
    assert board.hear(0.0) == ([], False)
    assert len(os.listdir("/dev/fd")) == before
