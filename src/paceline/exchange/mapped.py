"""Messages and collectives of processes of one machine, in memory that all of them map.

    memory of process 0   | ROUND, rooms | 2 slots | to each peer: SENT and lines | room |   room ..

    round     own numbers into a slot, ROUND  ..  all have begun this round: read all slots
    send      the tensor into a room, where it lies into a line, SENT
    receive   SENT  ..  the peer's line: copy from its room, and the line is free again

No socket and no thread: a message costs two copies, by the processes that wait for them anyway,
where gloo has a thread in each process that takes a core from a process that computes. Two slots
are enough: who begins a round has seen all others begin the one before, so they have read the one
before that. What is larger than a slot takes several rounds, each of as much as stays in a cache.
A further room is memory of its own, made when the others are full and mapped by who first receives
from it; like an allocator's, it is kept. Tensors of other devices go by the group below. Source of
the lines: the rings of MPI's transports in shared memory (D. Buntinas, G. Mercier, W. Gropp,
"Design and Evaluation of Nemesis", CCGrid 2006). Above 300 lines, since a message's way out and in
is read together. This module must not know what is sent.

*Rejected:* sums of which each member adds up a share and shows it to all in a second round: on two
cores 3 members take 7.2 ms for 16 MiB instead of 5.0, 4 as long, and 8 as long (26 ms).
"""

import os
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from ..errors import LinkError, ProtocolError
from ..store.memory import LINE_BYTES, WORD_BYTES, SharedMemory, Words
from .group import Made, MemberGroup, PeerGroup, Pending, plain

_LINE_WORDS: Final = LINE_BYTES // WORD_BYTES
_ROUND: Final = 0
_SHOWN: Final = 1
"""The bytes in each slot: a member that does something else is seen."""
_FURTHER_ROOMS, _ADDRESS_WORDS = 8, 4
"""The words where these are: for each an address, see `address_of`."""
_SLOT_BYTES: Final = 1 << 20
_NUM_SLOTS, _NUM_LINES = 2, 1024
"""A peer that neither takes messages nor waits for any has room for so many; the next waits."""
_PAGE: Final = 4096
"""The first one has the words of rounds and rooms."""
_FIRST_CHANNEL: Final = _PAGE + _SLOT_BYTES * _NUM_SLOTS
_CHANNEL_BYTES: Final = LINE_BYTES * (1 + _NUM_LINES)
_STATE, _TAG, _SIZE, _ROOM, _PLACE = range(5)
"""Words of a line; its state is 1 from when it is written until its message is copied."""
_LEAST_BLOCK: Final = 256
_ROOM_BYTES: Final = 1 << 23
"""Of the first room; each further one has at least twice as many as the one before. Pages are
allocated when they are touched."""
_WAIT_S = 0.1
"""Between looks at whether the others will come."""
_FULL_WAIT_S = 1e-3
"""Between looks at whether a full channel has a free line, of which nobody is told."""


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
        The memories by rank, of which only the mappings are left; None if any member could not map
        one, and why if that was this one.
    """
    memories, refusal = list[SharedMemory](), ""
    rows = torch.empty(_ADDRESS_WORDS * group.size, dtype=torch.int64)
    try:
        group.all_gather(torch.tensor(address_of(own)), rows).wait()
        try:
            for rank, address in enumerate(rows.view(-1, _ADDRESS_WORDS).tolist()):
                is_own = rank == group.rank
                memories.append(_map(own) if is_own else _mapped_at(*address))
        except OSError as error:
            refusal = f"worker {group.rank} cannot map another worker's memory ({error})"
        failed = torch.tensor([int(bool(refusal))])
        group.all_reduce(failed).wait()  # until then all keep their own one open
    finally:
        own.close_descriptor()
    return None if failed.item() else memories, refusal


def _map(memory: SharedMemory) -> SharedMemory:
    _ = memory.buffer
    return memory


def _mapped_at(*address: int) -> SharedMemory:
    """Map another process's memory, and close the descriptor: the mapping stays."""
    memory = SharedMemory(open_at(*address))
    try:
        return _map(memory)
    finally:
        memory.close_descriptor()


def mapped(below: PeerGroup, check: Callable[[], None]) -> PeerGroup:
    """Return the group whose members map each other's memory; the one below if one may not.

    Args:
        below: a group of processes of one machine; all of them call this.
        check: called now and then while this process waits; raises if no other will come.
    """
    if below.size == 1:
        return below
    memories, _ = map_all(SharedMemory.create(_room_start(below.size) + _ROOM_BYTES), below)
    return below if memories is None else MappedGroup(below, memories, check)


def _channel(peer: int) -> int:
    """Return the first word of the channel to a peer, SENT; its lines follow."""
    return (_FIRST_CHANNEL + peer * _CHANNEL_BYTES) // WORD_BYTES


def _room_start(size: int) -> int:
    """Return the bytes before the first room in a group of this size."""
    return -(-(_FIRST_CHANNEL + size * _CHANNEL_BYTES) // _PAGE) * _PAGE


def _further(room: int) -> int:
    """Return the first word of the place of a room after the first."""
    return _FURTHER_ROOMS + _ADDRESS_WORDS * (room - 1)


class _Block(NamedTuple):
    """Bytes of a room: a power of two, so that messages of other sizes can use them later."""

    room: int
    place: int
    size: int


class _Sent(NamedTuple):
    """A message of a peer, as its line describes it.

    Attributes:
        copy: its bytes, if its line had to be freed before anybody asked for it.
    """

    state: int
    size: int
    room: int
    place: int
    copy: Tensor | None = None


class _Rooms:
    """The memory in which this process's messages lie until they are copied.

    Args:
        words: of its own memory, in which others find further rooms.
        first: the first room.
    """

    def __init__(self, words: Words, first: Tensor) -> None:
        self._words, self._memories = words, list[SharedMemory]()
        self.tensors = [first]
        self._end = 0
        """Bytes of the last room that have been used."""
        self._free: defaultdict[int, list[_Block]] = defaultdict(list)

    def take(self, num_bytes: int) -> _Block:
        """Return a free block for so many bytes.

        Raises:
            LinkError: a further room is needed, and this machine has too little memory.
        """
        size = max(_LEAST_BLOCK, 1 << (num_bytes - 1).bit_length())
        if self._free[size]:
            return self._free[size].pop()
        if self._end + size > len(self.tensors[-1]):
            self._open(size)
        self._end += size
        return _Block(len(self.tensors) - 1, self._end - size, size)

    def _open(self, num_bytes: int) -> None:
        """Make a room of at least so many bytes; its descriptor stays open for the others."""
        memory = SharedMemory.create(max(2 * len(self.tensors[-1]), num_bytes))
        weakref.finalize(self, memory.close_descriptor)
        first = _further(len(self.tensors))
        for number, value in enumerate(address_of(memory)):
            self._words[first + number] = value
        self._memories.append(memory)
        self.tensors.append(memory.tensor())
        self._end = 0

    def give(self, block: _Block) -> None:
        self._free[block.size].append(block)


class MappedGroup(PeerGroup):
    """Members of one machine that map each other's memory; one thread of each uses it.

    A collective is over when it has begun, so no member may wait for a message that another one
    sends only after it.

    Attributes:
        sent_bytes: bytes that this process would have sent so, in all its groups, if no memory were
            mapped.

    Args:
        below: the same members, for what does not go through the memory.
        memories: by rank, see `mapped`.
        check: called now and then while this process waits; raises if no other will come.
    """

    sent_bytes = 0

    def __init__(
        self,
        below: PeerGroup,
        memories: Sequence[SharedMemory],
        check: Callable[[], None],
    ) -> None:
        self.rank, self.size = below.rank, below.size
        self._below, self._check, self._num_rounds = below, check, 0
        self._words = [Words(memory) for memory in memories]
        tensors = [memory.tensor() for memory in memories]
        self._slots = [
            [memory[_PAGE + _SLOT_BYTES * slot :][:_SLOT_BYTES] for memory in tensors]
            for slot in range(_NUM_SLOTS)
        ]
        self._rooms = [[memory[_room_start(self.size) :]] for memory in tensors]
        self._own_rooms = _Rooms(self._words[self.rank], self._rooms[self.rank][0])
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
        if tensor.device.type != "cpu":
            return self._below.all_reduce(tensor, is_maximum=is_maximum, at_once=at_once)
        combine = torch.maximum if is_maximum else torch.add
        numbers = plain(tensor.detach()).view(-1)
        self._count(2 * numbers.nbytes * (self.size - 1) // self.size)
        for piece in numbers.split(_SLOT_BYTES // numbers.itemsize):
            total, *others = self._round([piece])
            for other in others:  # in one order, so all have the same bits
                total = combine(total, other, out=piece)
        return Made()

    def all_gather(self, mine: Tensor, out: Tensor) -> Pending:
        if mine.device.type != "cpu":
            return self._below.all_gather(mine, out)
        numbers, rows = plain(mine.detach()).view(-1), plain(out.detach()).view(self.size, -1)
        length = _SLOT_BYTES // numbers.itemsize
        self._count(numbers.nbytes * (self.size - 1))
        for start in range(0, len(numbers), length):
            piece = numbers[start : start + length]
            for row, shown in zip(rows, self._round([piece]), strict=True):
                row[start : start + length].copy_(shown)
        return Made()

    def all_to_all(self, mine: Tensor, out: Tensor) -> Pending:
        if mine.device.type != "cpu":
            return self._below.all_to_all(mine, out)
        parts, rows = (plain(one.detach()).view(self.size, -1) for one in (mine, out))
        length = _SLOT_BYTES // self.size // parts.itemsize
        self._count(parts.nbytes * (self.size - 1) // self.size)
        for start in range(0, parts.shape[1], length):
            stop = min(start + length, parts.shape[1])
            shown = self._round([part[start:stop] for part in parts])
            for row, one in zip(rows, shown, strict=True):
                row[start:stop].copy_(one.view(self.size, -1)[self.rank])
        return Made()

    def _round(self, pieces: list[Tensor]) -> list[Tensor]:
        """Show numbers to all members, one piece after the other.

        Returns:
            What each member shows, ``(n,)``, until the next round but one.

        Raises:
            ProtocolError: another member shows another number of bytes.
        """
        self._num_rounds += 1
        number, at = self._num_rounds, self._num_rounds % _NUM_SLOTS
        dtype, num_bytes = pieces[0].dtype, sum(piece.nbytes for piece in pieces)
        own = self._words[self.rank]
        torch.cat(pieces, out=self._slots[at][self.rank][:num_bytes].view(dtype))
        own[_SHOWN + at] = num_bytes
        own.set_and_wake(_ROUND, number)
        for member, words in enumerate(self._words):
            while not words.wait_while(_ROUND, lambda value: value < number, _WAIT_S):
                self._look()
            if (shown := words[_SHOWN + at]) != num_bytes:
                raise ProtocolError(
                    f"member {member} exchanges {shown} bytes where member {self.rank} exchanges "
                    f"{num_bytes}"
                )
        return [slot[:num_bytes].view(dtype) for slot in self._slots[at]]

    def _count(self, num_bytes: int) -> None:
        MappedGroup.sent_bytes += num_bytes

    # -- messages -------------------------------------------------------------------------------

    def begin_send(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        if tensor.device.type != "cpu":
            return self._below.begin_send(tensor, peer, tag)
        state, words = self._next_line(peer), self._words[self.rank]
        self._lent[state] = block = self._block_for(tensor)
        room = self._own_rooms.tensors[block.room]
        _bytes_at(room, block.place, tensor).copy_(plain(tensor.detach()).view(-1))
        words[state + _TAG], words[state + _SIZE] = tag, tensor.nbytes
        words[state + _ROOM], words[state + _PLACE] = block.room, block.place
        words[state] = 1
        self._count(tensor.nbytes)
        self._num_sent[peer] += 1
        words.set_and_wake(_channel(peer), self._num_sent[peer])
        return Made()

    def begin_receive(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        if tensor.device.type != "cpu":
            return self._below.begin_receive(tensor, peer, tag)
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
            self._look()
        return state

    def _block_for(self, tensor: Tensor) -> _Block:
        """Return a block for this tensor, of those whose messages have been copied if possible."""
        words = self._words[self.rank]
        for state in [state for state in self._lent if not words[state]]:
            self._own_rooms.give(self._lent.pop(state))
        return self._own_rooms.take(tensor.nbytes)

    def _look(self) -> None:
        """Look whether others will come, and free their lines: they may wait for a free one."""
        self._check()
        for peer in range(self.size):
            self.take_messages(peer)
            self._set_aside(peer)

    def take_messages(self, peer: int) -> None:
        """Copy what a peer has sent to where it is awaited; remember the rest."""
        words = self._words[peer]
        for number in range(self._num_seen[peer], words[_channel(self.rank)]):
            state = _line(self.rank, number)
            key = (peer, words[state + _TAG])
            size, room, place = (words[state + word] for word in (_SIZE, _ROOM, _PLACE))
            sent = _Sent(state, size, room, place)
            self._num_seen[peer] += 1
            if self._awaited[key]:
                self._copy(sent, self._awaited[key].popleft(), key)
            else:
                self._arrived[key].append(sent)

    def _set_aside(self, peer: int) -> None:
        """Free the lines of messages that a peer has sent and nobody has asked for."""
        for (source, _), messages in self._arrived.items():
            for number, sent in enumerate(messages):
                if source == peer and sent.copy is None:
                    room = self._room_of(peer, sent.room)
                    copy = room[sent.place : sent.place + sent.size].clone()
                    messages[number] = sent._replace(copy=copy)
                    self._words[peer][sent.state] = 0

    def _copy(self, sent: _Sent, receive: "_Receive", key: tuple[int, int]) -> None:
        peer, tag = key
        tensor = receive.tensor
        if tensor.nbytes != sent.size:
            raise ProtocolError(
                f"member {peer} sent {sent.size} bytes where {tensor.nbytes} are expected "
                f"(tag {tag})"
            )
        if sent.copy is None:
            source = _bytes_at(self._room_of(peer, sent.room), sent.place, tensor)
        else:
            source = _bytes_at(sent.copy, 0, tensor)
        plain(tensor.detach()).view(-1).copy_(source)
        if sent.copy is None:
            self._words[peer][sent.state] = 0
        receive.has_come = True

    def _room_of(self, peer: int, number: int) -> Tensor:
        """Return a room of a peer, mapped when a first message comes from there."""
        rooms = self._rooms[peer]
        while len(rooms) <= number:
            first = _further(len(rooms))
            address = (self._words[peer][first + word] for word in range(_ADDRESS_WORDS))
            try:
                rooms.append(_mapped_at(*address).tensor())
            except OSError as error:
                raise LinkError(
                    f"member {self.rank} cannot map the memory of messages from member {peer} "
                    f"({error})"
                ) from error
        return rooms[number]

    def await_messages(self, peer: int) -> None:
        """Wait until a peer has sent more messages than were taken, and take them."""
        seen = self._num_seen[peer]
        while not self._words[peer].wait_while(
            _channel(self.rank), lambda value: value == seen, _WAIT_S
        ):
            self._look()
            if self._num_seen[peer] != seen:
                return
        self.take_messages(peer)


class _Receive:
    """A message that is awaited, and whether it has come."""

    def __init__(self, group: MappedGroup, tensor: Tensor, peer: int) -> None:
        self._group, self.tensor, self._peer = group, tensor, peer
        self.has_come = False

    def wait(self) -> None:
        while not self.has_come:
            self._group.await_messages(self._peer)


def _line(peer: int, number: int) -> int:
    """Return the word of the state of the line of message ``number`` to a peer."""
    return _channel(peer) + _LINE_WORDS * (1 + number % _NUM_LINES)


def _bytes_at(room: Tensor, place: int, tensor: Tensor) -> Tensor:
    """Return the numbers of a message in a room."""
    return room[place : place + tensor.nbytes].view(plain(tensor).dtype)
