"""How members and the coordinator talk: messages of any size, in order, whole."""

import threading

import pytest

from paceline.sessions.lane import Message, SocketLane, socket_pair

SIZE = SocketLane.PIECE_BYTES


@pytest.mark.parametrize("num_bytes", [0, 1, SIZE - 40, SIZE, SIZE + 1, 5 * SIZE, 40 * SIZE])
@pytest.mark.parametrize("is_blocking", [True, False])
def test_a_message_of_any_size_arrives_whole(num_bytes: int, is_blocking: bool) -> None:
    ours, theirs = (SocketLane(end) for end in socket_pair())
    sent: list[Message] = [("log", b"x" * num_bytes), ("stop", num_bytes)]
    ours.hold(sent[0])
    sender = threading.Thread(target=ours.send, args=(sent[1],))
    sender.start()  # it waits where the other end does not read
    heard: list[Message] = []
    while not heard:
        heard = theirs.receive(is_blocking)
    sender.join(5.0)
    assert heard == sent


@pytest.mark.parametrize("over", range(-8, 9))
def test_where_the_last_piece_is_cut(over: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SocketLane, "PIECE_BYTES", 16)
    ours, theirs = (SocketLane(end) for end in socket_pair())
    ours.send(("log", b"y" * (16 + over)))
    assert theirs.receive() == [("log", b"y" * (16 + over))]
    assert theirs.receive(False) == []


def test_a_piece_that_is_still_to_come_is_waited_for() -> None:
    ends = socket_pair()
    lane = SocketLane(ends[0])
    ends[1].send(b"+" + b"[")
    assert lane.receive(False) == []
    ends[1].close()
    with pytest.raises(ConnectionResetError):
        lane.receive()


def test_who_does_not_read_holds_nobody_up() -> None:
    """Of a worker that is stopped the coordinator does not wait."""
    ours, theirs = socket_pair()
    lane, reader = SocketLane(ours, waits=False), SocketLane(theirs)
    sent: list[Message] = [("log", number, b"z" * 50_000) for number in range(100)]
    for message in sent:
        lane.send(message)
    assert lane.is_late
    assert not lane.send_rest()
    heard: list[Message] = []
    while len(heard) < len(sent):
        heard += reader.receive()
        lane.send_rest()
    assert heard == sent
    assert not lane.is_late
