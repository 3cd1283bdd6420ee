"""Messages and small collectives of processes of one machine, in memory that all of them map.

    memory of process 0   | ROUND | 2 slots | to each peer: SENT and lines | room for messages |

    gather    own numbers into a slot, ROUND  ..  all have this ROUND: read all slots
    send      the tensor into the room, where it lies into a line, SENT
    receive   SENT  ..  the peer's line: copy from its room, and the line is free again

No socket and no thread: a message costs two copies, by the processes that wait for them anyway,
where gloo has a thread in each process that takes a core from a process that computes. Two slots
are enough: who begins a round has seen all others begin the one before, so they have read the one
before that. Tensors of other devices, large collectives, and messages for which there is no room go
by the group below; a line says so, so the order of messages stays. Source of the lines: the rings
of MPI's transports in shared memory (D. Buntinas, G. Mercier, W. Gropp, "Design and Evaluation of
Nemesis", CCGrid 2006). Above 300 lines, since a message's way out and in is read together. This
module must not know what is sent.
"""

import os
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from ..errors import LinkError
from ..store.memory import LINE_BYTES, WORD_BYTES, SharedMemory, Words
from ..system.limits import available_bytes
from .group import Made, MemberGroup, PeerGroup, Pending, plain

_LINE_WORDS: Final = LINE_BYTES // WORD_BYTES
_ROUND: Final = 0
_SLOT_BYTES: Final = 4096
_NUM_SLOTS, _NUM_LINES = 2, 256
_FIRST_CHANNEL: Final = _SLOT_BYTES * (1 + _NUM_SLOTS)
"""The first page has the words of rounds."""
_CHANNEL_BYTES: Final = LINE_BYTES * (1 + _NUM_LINES)
_STATE, _TAG, _SIZE, _PLACE = range(4)
"""Words of a line; its state is 1 from when it is written until its message is copied."""
_BELOW: Final = -1
"""The place of a message that goes by the group below."""
_LEAST_BLOCK: Final = 256
_MOST_ROOM_BYTES: Final = 1 << 28
_SHARE_OF_FREE: Final = 16
"""The room's most bytes, and the part of the free memory that it may be; pages are allocated when
they are touched."""
_WAIT_S = 0.1
"""Between looks at whether the others will come."""
_FULL_WAIT_S = 1e-3
"""Between looks at whether a full channel has a free line."""


def address_of(memory: SharedMemory) -> tuple[int, ...]:
    """Return where another process of this user can open it, for `open_at`."""
    status = os.fstat(memory.fd)
    return os.getpid(), memory.fd, status.st_dev, status.st_ino


def open_at(pid: int, number: int, device: int, inode: int) -> int:
    """Return a descriptor of another process's memory; OSError: this one may not open it."""
    fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
    status = os.fstat(fd)
    if (status.st_dev, status.st_ino) != (device, inode):  # a process in another container
        os.close(fd)
        raise OSError(f"process {pid} has another file there")
    return fd


def map_all(own: SharedMemory, group: MemberGroup) -> tuple[list[SharedMemory] | None, str]:
    """Map the memories of all members, each of which calls this with its own.

    The kernel lets processes of one user and container open each other's memory under /proc.

    Returns:
        The memories by rank, their descriptors closed; None if any member could not map one, and
        why if that was this one.
    """
    memories, refusal = list[SharedMemory](), ""
    rows = torch.empty(4 * group.size, dtype=torch.int64)
    group.all_gather(torch.tensor(address_of(own)), rows).wait()
    try:
        for rank, address in enumerate(rows.view(-1, 4).tolist()):
            memory = own if rank == group.rank else SharedMemory(open_at(*address))
            _ = memory.buffer  # maps it
            if rank != group.rank:
                memory.close_descriptor()
            memories.append(memory)
    except OSError as error:
        refusal = f"worker {group.rank} cannot map another worker's memory ({error})"
    failed = torch.tensor([int(bool(refusal))])
    group.all_reduce(failed).wait()  # until then all keep their own one open
    own.close_descriptor()  # the mappings stay
    return None if failed.item() else memories, refusal


def mapped(below: PeerGroup, check: Callable[[], None]) -> PeerGroup:
    """Return the group whose members map each other's memory; the one below if one may not.

    Args:
        below: a group of processes of one machine; all of them call this.
        check: called now and then while this process waits; raises if no other will come.
    """
    if below.size == 1:
        return below
    num_bytes = _room_start(below.size)
    num_bytes += min(_MOST_ROOM_BYTES, available_bytes() // _SHARE_OF_FREE)
    try:
        own = SharedMemory.create(num_bytes)
    except LinkError:  # without room: all messages go by the group below
        own = SharedMemory.create(_room_start(below.size))
    memories, _ = map_all(own, below)
    return below if memories is None else MappedGroup(below, memories, check)


def _channel(peer: int) -> int:
    """Return the first word of the channel to a peer, SENT; its lines follow."""
    return (_FIRST_CHANNEL + peer * _CHANNEL_BYTES) // WORD_BYTES


def _room_start(size: int) -> int:
    """Return the bytes before the room in a group of this size."""
    return -(-(_FIRST_CHANNEL + size * _CHANNEL_BYTES) // _SLOT_BYTES) * _SLOT_BYTES


class _Block(NamedTuple):
    """Bytes of the room: a power of two, so that messages of other sizes can use them later."""

    place: int
    size: int


class _Sent(NamedTuple):
    """A message of a peer, as its line describes it.

    Attributes:
        copy: its bytes, if its line had to be freed before anybody asked for it.
    """

    state: int
    size: int
    place: int
    copy: Tensor | None = None


class _Room:
    """The bytes in which this process's messages lie until they are copied."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes, self._end = num_bytes, 0
        self._free: defaultdict[int, list[_Block]] = defaultdict(list)

    def take(self, num_bytes: int) -> _Block | None:
        """Return a free block for so many bytes, if there is one."""
        size = max(_LEAST_BLOCK, 1 << (num_bytes - 1).bit_length())
        if self._free[size]:
            return self._free[size].pop()
        if self._end + size > self._num_bytes:
            return None
        self._end += size
        return _Block(self._end - size, size)

    def give(self, block: _Block) -> None:
        self._free[block.size].append(block)


class MappedGroup(PeerGroup):
    """Members of one machine that map each other's memory; one thread of each uses it.

    Attributes:
        sent_bytes: bytes that this process has sent so, in all its groups.

    Args:
        below: the same members, for what does not go through the memory.
        memories: by rank, see `mapped`.
        check: called now and then while this process waits; raises if no other will come.
    """

    sent_bytes = 0

    def __init__(
        self, below: PeerGroup, memories: Sequence[SharedMemory], check: Callable[[], None]
    ) -> None:
        self.rank, self.size = below.rank, below.size
        self._below, self._check, self._num_rounds = below, check, 0
        self._words = [Words(memory) for memory in memories]
        tensors = [memory.tensor() for memory in memories]
        self._slots = [
            [memory[_SLOT_BYTES * (1 + slot) :][:_SLOT_BYTES] for memory in tensors]
            for slot in range(_NUM_SLOTS)
        ]
        self._rooms = [memory[_room_start(self.size) :] for memory in tensors]
        self._room = _Room(len(self._rooms[self.rank]))
        self._num_sent, self._num_seen = [0] * self.size, [0] * self.size
        self._lent: dict[int, _Block] = {}
        """Blocks by the words of their lines' states."""
        self._arrived: defaultdict[tuple[int, int], deque[_Sent]] = defaultdict(deque)
        self._awaited: defaultdict[tuple[int, int], deque[_Receive]] = defaultdict(deque)
        """By peer and tag: messages that nobody has asked for, and receives without a message."""

    # -- collectives ----------------------------------------------------------------------------

    def all_reduce(
        self, tensor: Tensor, *, is_maximum: bool = False, at_once: bool = False
    ) -> Pending:
        if not _is_small(tensor):
            return self._below.all_reduce(tensor, is_maximum=is_maximum, at_once=at_once)
        numbers = plain(tensor).view(-1)
        rows = torch.empty(self.size * len(numbers), dtype=numbers.dtype)
        self._gather(numbers, rows)
        first, *others = rows.view(self.size, -1)
        for row in others:  # in one order, so all have the same bits
            torch.maximum(first, row, out=first) if is_maximum else first.add_(row)
        numbers.copy_(first)
        return Made()

    def all_gather(self, mine: Tensor, out: Tensor) -> Pending:
        if not _is_small(mine):
            return self._below.all_gather(mine, out)
        self._gather(plain(mine).view(-1), plain(out).view(-1))
        return Made()

    def all_to_all(self, mine: Tensor, out: Tensor) -> Pending:
        return self._below.all_to_all(mine, out)

    def _gather(self, mine: Tensor, out: Tensor) -> None:
        """Gather a small ``(n,)`` tensor of each member into ``(size * n,)``."""
        self._num_rounds += 1
        MappedGroup.sent_bytes += mine.nbytes
        slots = self._slots[self._num_rounds % _NUM_SLOTS]
        slots[self.rank][: mine.nbytes].view(mine.dtype).copy_(mine)
        self._words[self.rank].set_and_wake(_ROUND, self._num_rounds)
        number = self._num_rounds
        for words, slot, row in zip(self._words, slots, out.view(self.size, -1), strict=True):
            while not words.wait_while(_ROUND, lambda value: value < number, _WAIT_S):
                self._check()
            row.copy_(slot[: mine.nbytes].view(mine.dtype))

    # -- messages -------------------------------------------------------------------------------

    def begin_send(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        state, words = self._next_line(peer), self._words[self.rank]
        block = self._block_for(tensor) if tensor.device.type == "cpu" else None
        pending: Pending = Made()
        if block is None:
            pending = self._below.begin_send(tensor, peer, tag)
        else:
            self._lent[state] = block
            MappedGroup.sent_bytes += tensor.nbytes
            _bytes_at(self._rooms[self.rank], block.place, tensor).copy_(plain(tensor).view(-1))
        words[state + _TAG], words[state + _SIZE] = tag, tensor.nbytes
        words[state + _PLACE] = _BELOW if block is None else block.place
        words[state] = 1
        self._num_sent[peer] += 1
        words.set_and_wake(_channel(peer), self._num_sent[peer])
        return pending

    def begin_receive(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        receive, key = _Receive(self, tensor, peer), (peer, tag)
        if self._arrived[key]:
            self._copy(self._arrived[key].popleft(), receive, key)
        else:
            self._awaited[key].append(receive)
        return receive

    def _next_line(self, peer: int) -> int:
        """Return the word of the next line's state, once that line is free."""
        state = _line(peer, self._num_sent[peer])
        while not self._words[self.rank].wait_while(state, bool, _FULL_WAIT_S):
            self._check()
            for other in range(self.size):  # that peer may itself wait for a free line
                self.take_messages(other)
                self._set_aside(other)
        if (block := self._lent.pop(state, None)) is not None:
            self._room.give(block)
        return state

    def _block_for(self, tensor: Tensor) -> _Block | None:
        """Return a free block, if there is one for this tensor."""
        words = self._words[self.rank]
        for state in [state for state in self._lent if not words[state]]:
            self._room.give(self._lent.pop(state))
        return self._room.take(tensor.nbytes)

    def take_messages(self, peer: int) -> None:
        """Copy what a peer has sent to where it is awaited; remember the rest."""
        words, first = self._words[peer], self._num_seen[peer]
        self._num_seen[peer] = words[_channel(self.rank)]
        for number in range(first, self._num_seen[peer]):
            state = _line(self.rank, number)
            key = (peer, words[state + _TAG])
            sent = _Sent(state, words[state + _SIZE], words[state + _PLACE])
            if self._awaited[key]:
                self._copy(sent, self._awaited[key].popleft(), key)
            else:
                self._arrived[key].append(sent)

    def _set_aside(self, peer: int) -> None:
        """Free the lines of messages that a peer has sent and nobody has asked for."""
        for (source, _), messages in self._arrived.items():
            for number, sent in enumerate(messages):
                if source == peer and sent.copy is None:
                    copy = torch.empty(0, dtype=torch.uint8)
                    if sent.place != _BELOW:
                        copy = self._rooms[peer][sent.place : sent.place + sent.size].clone()
                    messages[number] = sent._replace(copy=copy)
                    self._words[peer][sent.state] = 0

    def _copy(self, sent: _Sent, receive: "_Receive", key: tuple[int, int]) -> None:
        peer, tag = key
        tensor = receive.tensor
        if tensor.nbytes != sent.size:
            raise RuntimeError(
                f"worker {peer} sent {sent.size} bytes where {tensor.nbytes} are expected "
                f"(tag {tag})"
            )
        if sent.place == _BELOW:
            receive.pending = self._below.begin_receive(tensor, peer, tag)
        else:
            room, place = (self._rooms[peer], sent.place) if sent.copy is None else (sent.copy, 0)
            plain(tensor).view(-1).copy_(_bytes_at(room, place, tensor))
            receive.pending = Made()
        if sent.copy is None:
            self._words[peer][sent.state] = 0

    def await_messages(self, peer: int) -> None:
        """Wait until a peer has sent more messages than were taken, and take them."""
        seen = self._num_seen[peer]
        while not self._words[peer].wait_while(
            _channel(self.rank), lambda value: value == seen, _WAIT_S
        ):
            self._check()
        self.take_messages(peer)


class _Receive:
    """A message that is awaited.

    Attributes:
        pending: what is left to do once its line has been read; None: it has not.
    """

    def __init__(self, group: MappedGroup, tensor: Tensor, peer: int) -> None:
        self._group, self.tensor, self._peer = group, tensor, peer
        self.pending: Pending | None = None

    def wait(self) -> None:
        while self.pending is None:
            self._group.await_messages(self._peer)
        self.pending.wait()


def _line(peer: int, number: int) -> int:
    """Return the word of the state of the line of message ``number`` to a peer."""
    return _channel(peer) + _LINE_WORDS * (1 + number % _NUM_LINES)


def _bytes_at(room: Tensor, place: int, tensor: Tensor) -> Tensor:
    """Return the numbers of a message in a room."""
    return room[place : place + tensor.nbytes].view(plain(tensor).dtype)


def _is_small(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and 0 < tensor.nbytes <= _SLOT_BYTES
