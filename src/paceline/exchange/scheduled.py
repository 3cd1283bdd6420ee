"""A schedule of `collectives/` on tensors, by ``torch.distributed`` from rank to rank.

    round of one rank    send ...  send ...        the chunks as they are before the round
                         receive ... receive ...   to add: into a buffer; to copy: in place
                         wait for all of them
                         add what arrived, in the schedule's order

The transfers are the same list that is proved on sets of contributors and priced on a topology;
here every rank picks its own part of it. All ranks end with the same bits, whoever was faster: a
sum is made in one place, or of two parts in two places. It must not know who averages, or why.
"""

import queue
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..collectives import parse
from ..collectives.base import Collective
from ..collectives.transfers import Action, Operation, Round, bounds
from ..errors import ConfigError
from .group import MemberGroup, Parcel, Pending, TorchGroup, plain

Span = tuple[int, int]  # elements, from and up to


@dataclass(frozen=True, slots=True, kw_only=True)
class _Message:
    """One message of this rank; adjacent chunks are joined."""

    peer: int
    spans: tuple[Span, ...]
    action: Action
    is_in_place: bool = False  # may be received where it belongs

    @property
    def num_elements(self) -> int:
        return sum(end - begin for begin, end in self.spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turn:
    """What this rank does in one round."""

    sends: tuple[_Message, ...]
    receives: tuple[_Message, ...]


class ScheduledCollective:
    """This rank's part of a collective.

    Args:
        group: sends the messages; None: the default group of ``torch.distributed``.

    Raises:
        ConfigError: the group has another number of ranks than the collective.
    """

    def __init__(self, collective: Collective, group: TorchGroup | None = None) -> None:
        self._group = group = TorchGroup() if group is None else group
        if group.size != collective.num_ranks:
            raise ConfigError(
                f"{collective} is for {collective.num_ranks} ranks, but the group has "
                f"{group.size}; parse it with {group.size}"
            )
        self.collective = collective
        self._turns: dict[tuple[Operation, int, int, int], list[_Turn]] = {}

    def all_reduce(self, tensor: Tensor, *, is_maximum: bool = False) -> None:
        """Sum all ranks' tensors, or take their maximum, in place: `run` of an all-reduce."""
        self.run(tensor, Operation.ALL_REDUCE, is_maximum=is_maximum)

    def run(
        self,
        tensor: Tensor,
        operation: Operation,
        *,
        root: int = 0,
        is_maximum: bool = False,
    ) -> None:
        """Run the operation in place, on n elements of any dtype and device the group supports.

        Where the result of a rank is only a part (`collectives/transfers.py`), the rest of its
        tensor holds intermediate values. All ranks call it with equally many elements of one
        dtype; an all-to-all takes the blocks of all ranks, P x P, and reads the own row.

        Args:
            tensor: of any shape.

        Raises:
            ConfigError: the collective has no such operation for so many ranks.
            RuntimeError, LinkError: a peer is gone.
        """
        flat = tensor.contiguous().view(-1)
        for turn in self._turns_for(operation, root, flat.numel(), flat.element_size()):
            self._take(turn, flat, is_maximum=is_maximum)
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat.view(tensor.shape))

    def _take(self, turn: _Turn, flat: Tensor, *, is_maximum: bool) -> None:
        buffers = [
            flat[slice(*message.spans[0])]
            if message.is_in_place
            else flat.new_empty(message.num_elements)
            for message in turn.receives
        ]
        sent = []
        for message in turn.sends:
            parts = [flat[begin:end] for begin, end in message.spans]
            sent.append(Parcel(message.peer, parts[0] if len(parts) == 1 else torch.cat(parts)))
        received = [
            Parcel(message.peer, buffer)
            for message, buffer in zip(turn.receives, buffers, strict=True)
        ]
        self._group.swap(sent, received)
        for message, arrived in zip(turn.receives, buffers, strict=True):
            if not message.is_in_place:
                _write(flat, message, arrived, is_maximum=is_maximum)

    def _turns_for(
        self, operation: Operation, root: int, num_elements: int, element_bytes: int
    ) -> list[_Turn]:
        """Return this rank's rounds for so many elements, made once."""
        key = (operation, root, num_elements, element_bytes)
        if key not in self._turns:
            schedule = self.collective.for_size(num_elements * element_bytes)
            edges = bounds(num_elements, schedule.num_chunks(operation))
            rounds = schedule.rounds(operation, root)
            self._turns[key] = list(self._own_turns(rounds, edges))
        return self._turns[key]

    def _own_turns(self, rounds: Iterable[Round], edges: Sequence[Span]) -> Iterator[_Turn]:
        for transfers in rounds:
            sends: list[_Message] = []
            receives: list[_Message] = []
            for transfer in transfers:
                if self._group.rank not in (transfer.source, transfer.destination):
                    continue
                is_sender = transfer.source == self._group.rank
                message = _Message(
                    peer=transfer.destination if is_sender else transfer.source,
                    spans=_joined([edges[chunk] for chunk in transfer.chunks]),
                    action=transfer.action,
                )
                if message.spans:
                    (sends if is_sender else receives).append(message)
            if sends or receives:
                sent = [span for message in sends for span in message.spans]
                yield _Turn(
                    sends=tuple(sends),
                    receives=tuple(_placed(message, sent) for message in receives),
                )


class _Sum:
    """One sum of a group that follows a schedule."""

    def __init__(self, tensor: Tensor, *, is_maximum: bool) -> None:
        self._tensor, self._is_maximum = tensor, is_maximum
        self.is_over = threading.Event()
        self._error: BaseException | None = None

    def make(self, sums: ScheduledCollective) -> None:
        try:
            sums.all_reduce(self._tensor, is_maximum=self._is_maximum)
        except BaseException as error:  # raised again where it is waited for
            self._error = error
        self.is_over.set()

    def wait(self) -> None:
        self.is_over.wait()
        if self._error is not None:
            raise self._error


class ScheduledGroup(MemberGroup):
    """Members whose sums follow a schedule; their other operations are torch's own.

        caller   all_reduce A, all_reduce B ............ wait A ... wait B
        thread        [A, round by round      ][B             ]

    The caller makes a sum that is waited for at once: passing it to the thread and back takes two
    thread switches, more than the rounds of a small sum.

    Args:
        below: carries the messages.
        is_apart: whether sums run in a thread of their own, so that the caller computes
            meanwhile. On an accelerator they are asynchronous anyway.

    Raises:
        ConfigError: the schedule is for another number of members.
    """

    def __init__(self, collective: Collective, below: TorchGroup, *, is_apart: bool) -> None:
        self.rank, self.size = below.rank, below.size
        self._sums, self._below = ScheduledCollective(collective, below), below
        self._is_apart, self._queue = is_apart, queue.SimpleQueue[_Sum]()
        self._thread: threading.Thread | None = None
        self._newest: _Sum | None = None
        """The last sum that was given to the thread."""

    def all_reduce(
        self, tensor: Tensor, *, is_maximum: bool = False, at_once: bool = False
    ) -> Pending:
        new_sum, before = _Sum(plain(tensor), is_maximum=is_maximum), self._newest
        if at_once or not self._is_apart or tensor.device.type != "cpu":
            if before is not None:
                before.is_over.wait()
            new_sum.make(self._sums)
            return new_sum
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="paceline-sums", daemon=True)
            self._thread.start()
        self._newest = new_sum
        self._queue.put(new_sum)
        return new_sum

    def _work(self) -> None:
        while True:
            self._queue.get().make(self._sums)

    def all_gather(self, mine: Tensor, out: Tensor) -> Pending:
        return self._below.all_gather(mine, out)

    def all_to_all(self, mine: Tensor, out: Tensor) -> Pending:
        return self._below.all_to_all(mine, out)


def along(collective: str, members: TorchGroup, *, is_apart: bool = False) -> MemberGroup:
    """Return a group that sums by this collective: ``native``, or a schedule's name."""
    if collective == "native":
        return members
    return ScheduledGroup(parse(collective, members.size), members, is_apart=is_apart)


def _placed(message: _Message, sent: Sequence[Span]) -> _Message:
    """Return it received in place, if it replaces one span that is not sent at the same time."""
    if message.action is Action.REDUCE or len(message.spans) > 1:
        return message
    ((begin, end),) = message.spans
    if any(first < end and begin < last for first, last in sent):
        return message
    return _Message(peer=message.peer, spans=message.spans, action=message.action, is_in_place=True)


def _joined(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Drop empty spans and join adjacent ones, in the order of the chunks."""
    joined: list[Span] = []
    for begin, end in spans:
        if begin == end:
            continue
        if joined and joined[-1][1] == begin:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((begin, end))
    return tuple(joined)


def _write(flat: Tensor, message: _Message, arrived: Tensor, *, is_maximum: bool) -> None:
    first = 0
    for begin, end in message.spans:
        target, values = flat[begin:end], arrived[first : first + end - begin]
        first += end - begin
        if message.action is Action.COPY:
            target.copy_(values)
        elif is_maximum:
            torch.maximum(target, values, out=target)
        else:
            target.add_(values)
