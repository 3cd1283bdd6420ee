"""The batches of leases, where a lease is a mini-batch of a stream: a number.

    lease = number, or several -> client -> who reads (this member, or another) -> batch
                                     |
                                     nothing there: the stream is over, or the work is another's

In the run one member is told to read; each is told where. What a member learns on the way, that the
stream is over or where the data set is, it tells the run. This module must not know who decides
that, nor what a step does with a batch.
"""

import threading
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader

from ..errors import WorkerError
from ..events import Lease
from ..speed import Speed
from ..wire.messages import (
    FromMember,
    Note,
    OfStream,
    ReadStream,
    StreamAt,
    StreamOver,
    StreamServed,
    StreamState,
)
from .feed import apply
from .loader import NOTHING, LeasedLoader
from .numbers import Numbers, Strides, numbered
from .serving import Received, StreamClient, StreamServer
from .stream import Answer, Broken, Extent, Gone, Over, StreamReading
from .stream_source import StreamSource, mini_batch

_PATIENCE_S = 1.0


class StreamLink(Protocol):
    """What this asks of the run."""

    def tell(self, message: FromMember) -> None: ...

    def look_for_stream(self, *, is_blocking: bool) -> bool:
        """Hear what has come, or what comes; False: what this member waits for is not its own."""


class StreamedLoader(LeasedLoader):
    """A user's loader over an iterable data set, handed out by numbers.

    Args:
        loader: the user's.
        numbers: of the pass that comes; an update averages ``size`` of them.
        num_each: of them in a lease.
        is_global: the loader's batch size is what an update averages, not a mini-batch.

    Attributes:
        samples_each: of a mini-batch; 1 where the data set gives whole batches.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        seed: int,
        device: torch.device,
        speed: Speed | None = None,
        *,
        numbers: Numbers,
        num_each: int = 1,
        is_global: bool,
    ) -> None:
        self._parts, self._num_each = numbers.size // num_each, num_each
        size = mini_batch(loader, self._parts, is_global=is_global)
        super().__init__(numbered(numbers), seed, device, speed)
        self.loader, self.dataset, self.is_stream = loader, loader.dataset, True
        self._pins = loader.pin_memory and torch.accelerator.is_available()
        self.samples_each, self._counts = size or 1, dict[int, int]()
        self._size, self._numbers = size, numbers
        self._source = StreamSource(loader, size, seed)
        self.most_ahead = max(4, 2 * numbers.size)
        self._client, self._at = StreamClient(), StreamAt(-1, -1, "", b"")
        self._server: StreamServer | None = None
        self._reading: StreamReading | None = None
        self._begun, self._passed = threading.Condition(), -1
        self._news: SimpleQueue[Any] = SimpleQueue()
        self._pace = Strides()
        self._guess: tuple[int, int] | None = None
        self._over = -1
        """The last pass whose end was told."""

    link: StreamLink

    @property
    def lookahead(self) -> int:
        """More than 0: it is to be told what it is granted. None are reserved for it.

        Which mini-batches make an update would depend on who joins when; it guesses instead.
        """
        return 1

    def notes(self) -> list[str]:
        """What is to be known of it, for the plan."""
        source, each = self._source, f"{self.samples_each:,} samples"
        what = "one that the data set gives" if self._size is None else f"{each} in a row"
        resumes = "by the data set's own state_dict" if source.saves else "by reading it again"
        inside = f"{source.num_prefetched} in its loader worker{'s' * (source.num_workers > 1)}"
        return [
            f"stream: one worker reads it for all; a mini-batch is {what}, and each is used once",
            f"stream: at most {self.most_ahead} mini-batches are read ahead and {inside}, "
            "and those at work are kept",
            f"stream: after a death, and with --resume, it goes on {resumes}; "
            "what it gives must be the same again",
            "stream: each epoch reads a copy of the data set as the script has it then, to its end;"
            " one that never ends needs pace.updates(n, loader)",
        ]

    # -- what the run says ----------------------------------------------------------------------

    def hear(self, message: OfStream) -> None:
        if isinstance(message, StreamAt):
            self._at = message
        elif isinstance(message, ReadStream):
            self._read(message)
        else:
            self._client.done_with(*message)

    def _read(self, message: ReadStream) -> None:
        """Be the one who reads."""
        if self._server is None:
            self._server = StreamServer(self._find, self._done_with)
        if self._reading is not None:
            self._reading.stop()
        drops_rest = self._size is not None and self.loader.drop_last
        extent = Extent(
            message.epoch, message.first, message.done, message.number, self.most_ahead,
            self._parts if drops_rest else 1,
        )  # fmt: skip
        batches = self._source.open(message.epoch, message.state)
        self._news = SimpleQueue()  # what an older reading still has to say is of another pass
        with self._begun:
            self._reading = StreamReading(batches, extent, self._news)
            self._begun.notify_all()
        self.link.tell(StreamServed(message.epoch, self._server.address, self._server.key))

    def _find(self, epoch: int, number: int) -> Answer | None:
        """For a thread of the server: it may ask before this member has begun to read."""
        with self._begun:
            is_over = self._passed >= epoch
            self._begun.wait_for(lambda: is_over or self._reads(epoch), _PATIENCE_S)
        reading = self._reading
        return reading.answer(number) if reading is not None and self._reads(epoch) else None

    def _reads(self, epoch: int) -> bool:
        return self._reading is not None and self._reading.extent.epoch == epoch

    def _done_with(self, epoch: int, first: int, others: tuple[int, ...]) -> None:
        reading = self._reading
        if reading is not None and reading.extent.epoch == epoch:
            reading.done_with(first, others)

    def _tell_news(self) -> None:
        """What the thread that reads has found."""
        reading = self._reading
        while reading is not None:
            try:
                news = self._news.get_nowait()
            except Empty:
                return
            if isinstance(news, Over):
                self._tell_end(reading.extent.epoch, news.end)
            elif isinstance(news, str):
                self.link.tell(Note(news))
            elif isinstance(news, tuple):
                self.link.tell(StreamState(reading.extent.epoch, *news))

    def _tell_end(self, epoch: int, end: int) -> None:
        if self._over < epoch:
            self._over = epoch
            self.link.tell(StreamOver(epoch, end))

    # -- batches --------------------------------------------------------------------------------

    def reserve(self, leases: Sequence[Lease]) -> None:
        self._known.extend(leases)
        if leases:
            self._pace.note(leases[0])
        self._ask()

    def _ask(self) -> None:
        for one in self._known:
            self._client.ask(one.epoch, one.start)

    def fetch(self, lease: Lease) -> Any:
        """The batch of this number, or ``NOTHING``.

        Raises:
            WorkerError: the stream cannot be read.
        """
        self._tell_news()
        batch = super().fetch(lease)
        if not self._known:
            self._guess_next()
        return batch

    def _guess_next(self) -> None:
        """Ask for what probably comes, and leave what was guessed before and did not come."""
        guess, before = self._pace.guess(), self._guess
        if guess == before:
            return
        if before is not None and before != self._pace.last:
            for number in self._numbers_from(before[1]):
                self._client.forget(before[0], number)
        if guess is not None:
            for number in self._numbers_from(guess[1]):
                self._client.ask(guess[0], number)
        self._guess = guess

    def _numbers_from(self, first: int) -> range:
        """Those of the lease that begins with this one."""
        return range(first, first + self._num_each)

    def has(self, lease: Lease) -> bool:
        """Whether there is a mini-batch of this number: it is read when this returns."""
        found = self._wait(lease)
        if found is not None:
            self._client.put_back(lease.epoch, lease.start, found)
        return isinstance(found, Received | Broken)

    def num_samples_of(self, lease: Lease) -> int:
        return self._counts.pop(lease.start)

    def fetch_ahead(self) -> None:
        if self._known and self._client.is_here(self._known[0].epoch, self._known[0].start):
            super().fetch_ahead()

    def _load(self, lease: Lease) -> tuple[Any, float | None]:
        found = self._wait(lease)
        if isinstance(found, Broken):
            raise WorkerError(found.text)
        if isinstance(found, Over):
            self._tell_end(lease.epoch, found.end)
        if not isinstance(found, Received):
            return NOTHING, None
        self._counts[lease.start], batch = found.num_samples, found.batch
        return (apply(lambda one: one.pin_memory(), batch) if self._pins else batch), None

    def _wait(self, lease: Lease) -> Received | Over | Gone | Broken | None:
        """What there is of it; None: it is another's by now."""
        is_wanted = True
        while is_wanted:
            is_other = self._at.address != self._client.address
            if not self._client.is_connected and not is_other:
                is_wanted = self.link.look_for_stream(is_blocking=True)
                continue
            if is_other:
                self._client.connect(self._at.address, self._at.key)
                self._ask()
            found = self._client.take(lease.epoch, lease.start)
            if found is not None:
                return found
            self._tell_news()
            is_wanted = self.link.look_for_stream(is_blocking=False)
        return None

    def close(self) -> None:
        self._client.drop()
        if self._server is not None:
            self._server.close()
        super().close()

    def end_epoch(self) -> None:
        if self._reading is not None:
            self._tell_news()
            self._passed = self._reading.extent.epoch
            self._reading.stop()
            self._reading = None
        self._client.forget_all()
        self._guess = None
        self._counts.clear()
        super().end_epoch()
