"""A schedule of `collectives/` on tensors, by ``torch.distributed`` from rank to rank.

    round of one rank    send ...  send ...        the chunks as they are before the round
                         receive ... receive ...   where it adds: beside; where it copies: in place
                         wait for all of them
                         add what came, in the schedule's order

What is sent is the same list that is proved on sets of contributors and priced on a topology; here
every rank picks its own part of it. All ranks end with the same bits, whoever was faster: a sum is
made in one place, or of two parts in two places. It must not know who averages, or why.
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
    """One message of this rank: its chunks, those that lie side by side joined."""

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
        group: who sends to whom; the default one of ``torch.distributed`` where none is given.

    Raises:
        ConfigError: the group has another number of ranks than the collective.
    """

    def __init__(self, collective: Collective, group: TorchGroup | None = None) -> None:
        self._group = group = TorchGroup() if group is None else group
        if group.size != collective.num_ranks:
            raise ConfigError(
                f"{collective} is made for {collective.num_ranks} ranks, and the group has "
                f"{group.size}; parse it with {group.size}"
            )
        self.collective = collective
        self._turns: dict[tuple[Operation, int, int, int], list[_Turn]] = {}

    def all_reduce(self, tensor: Tensor, *, is_maximum: bool = False) -> None:
        """All ranks' tensors become their sum, or their maximum: `run` of an all-reduce."""
        self.run(tensor, Operation.ALL_REDUCE, is_maximum=is_maximum)

    def run(
        self,
        tensor: Tensor,
        operation: Operation,
        *,
        root: int = 0,
        is_maximum: bool = False,
    ) -> None:
        """The operation, in place, on n elements of any type and any device that the group carries.

        Where a rank is promised only a part (`collectives/transfers.py`), what else lies in its
        tensor afterwards are intermediate values. All ranks call it with equally many elements, of
        one type; an all-to-all takes the blocks of all ranks, P x P, of which the own row counts.

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
        beside = [
            flat[slice(*one.spans[0])] if one.is_in_place else flat.new_empty(one.num_elements)
            for one in turn.receives
        ]
        sent = []
        for one in turn.sends:
            parts = [flat[begin:end] for begin, end in one.spans]
            sent.append(Parcel(one.peer, parts[0] if len(parts) == 1 else torch.cat(parts)))
        self._group.swap(
            sent, [Parcel(one.peer, into) for one, into in zip(turn.receives, beside, strict=True)]
        )
        for one, came in zip(turn.receives, beside, strict=True):
            if not one.is_in_place:
                _write(flat, one, came, is_maximum=is_maximum)

    def _turns_for(
        self, operation: Operation, root: int, num_elements: int, element_bytes: int
    ) -> list[_Turn]:
        """This rank's rounds for so many elements, made once."""
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
            for one in transfers:
                if self._group.rank not in (one.source, one.destination):
                    continue
                is_mine = one.source == self._group.rank
                message = _Message(
                    peer=one.destination if is_mine else one.source,
                    spans=_joined([edges[chunk] for chunk in one.chunks]),
                    action=one.action,
                )
                if message.spans:
                    (sends if is_mine else receives).append(message)
            if sends or receives:
                sent = [span for one in sends for span in one.spans]
                yield _Turn(
                    sends=tuple(sends), receives=tuple(_placed(one, sent) for one in receives)
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
        except BaseException as error:  # whoever waits for it has to know
            self._error = error
        self.is_over.set()

    def wait(self) -> None:
        self.is_over.wait()
        if self._error is not None:
            raise self._error


class ScheduledGroup(MemberGroup):
    """Members whose sums follow a schedule; what else they do is torch's own.

        caller   all_reduce A, all_reduce B ............ wait A ... wait B
        thread        [A, round by round      ][B             ]

    A sum that is waited for at once is made by the caller: to hand it over and to hear of its end
    takes two changes of threads, more than the rounds of a small one.

    Args:
        below: what carries the messages.
        is_apart: whether sums go on in a thread of their own, so that the caller computes
            meanwhile. On an accelerator they go on by themselves.

    Raises:
        ConfigError: they are not as many as the schedule is for.
    """

    def __init__(self, collective: Collective, below: TorchGroup, *, is_apart: bool) -> None:
        self.rank, self.size = below.rank, below.size
        self._sums, self._below = ScheduledCollective(collective, below), below
        self._is_apart, self._asked = is_apart, queue.SimpleQueue[_Sum]()
        self._thread: threading.Thread | None = None
        self._newest: _Sum | None = None
        """Of those that were handed to the thread."""

    def all_reduce(
        self, tensor: Tensor, *, is_maximum: bool = False, at_once: bool = False
    ) -> Pending:
        asked, before = _Sum(plain(tensor), is_maximum=is_maximum), self._newest
        if at_once or not self._is_apart or tensor.device.type != "cpu":
            if before is not None:
                before.is_over.wait()
            asked.make(self._sums)
            return asked
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="paceline-sums", daemon=True)
            self._thread.start()
        self._newest = asked
        self._asked.put(asked)
        return asked

    def _work(self) -> None:
        while True:
            self._asked.get().make(self._sums)

    def all_gather(self, mine: Tensor, out: Tensor) -> Pending:
        return self._below.all_gather(mine, out)

    def all_to_all(self, mine: Tensor, out: Tensor) -> Pending:
        return self._below.all_to_all(mine, out)


def along(collective: str, members: TorchGroup, *, is_apart: bool = False) -> MemberGroup:
    """These members, as they sum by this collective: ``native``, or a schedule by its name."""
    if collective == "native":
        return members
    return ScheduledGroup(parse(collective, members.size), members, is_apart=is_apart)


def _placed(message: _Message, sent: Sequence[Span]) -> _Message:
    """Received in place, if it replaces one span that is not being sent at the same time."""
    if message.action is Action.REDUCE or len(message.spans) > 1:
        return message
    ((begin, end),) = message.spans
    if any(first < end and begin < last for first, last in sent):
        return message
    return _Message(peer=message.peer, spans=message.spans, action=message.action, is_in_place=True)


def _joined(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Without the empty ones, those that touch made one. In the order of the chunks."""
    joined: list[Span] = []
    for begin, end in spans:
        if begin == end:
            continue
        if joined and joined[-1][1] == begin:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((begin, end))
    return tuple(joined)


def _write(flat: Tensor, message: _Message, came: Tensor, *, is_maximum: bool) -> None:
    first = 0
    for begin, end in message.spans:
        mine, theirs = flat[begin:end], came[first : first + end - begin]
        first += end - begin
        if message.action is Action.COPY:
            mine.copy_(theirs)
        elif is_maximum:
            torch.maximum(mine, theirs, out=mine)
        else:
            mine.add_(theirs)
