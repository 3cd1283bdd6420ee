"""The batches of leases on a stream, where a lease is the number of a mini-batch.

    lease = one number or several -> client -> the reader (this member or another) -> batch
                                        |
                                        no batch: the stream is over, or the work is another's

The run tells one member to read, and all members where. A member reports to the run when the stream
ends, and the data set's own state. This module must not know who decides that, nor what a step does
with a batch.
"""

import time
from collections.abc import Sequence
from queue import Empty
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
from .reader import StreamReader
from .serving import Received, StreamClient
from .stream import Broken, Extent, Gone, Over
from .stream_source import StreamSource, mini_batch

_LOOK_S, _MOST_LOOKS = 0.001, 1000
"""Between two attempts to reach the reader; after so many it blocks for the run's messages."""


class StreamLink(Protocol):
    """What a streamed loader needs of the run."""

    def tell(self, message: FromMember) -> None: ...

    def look_for_stream(self, *, is_blocking: bool) -> bool:
        """Handle messages of the run; False: this member no longer holds the lease it waits for.

        Args:
            is_blocking: wait for the next message.
        """


class StreamedLoader(LeasedLoader):
    """A user's loader over an iterable data set, whose mini-batches are leased by number.

    Args:
        loader: the user's.
        numbers: the numbers of the next pass; an update averages ``size`` of them.
        num_each: numbers in a lease.
        is_global: the loader's batch size is what an update averages, not a mini-batch.

    Attributes:
        samples_each: samples of a mini-batch; 1 where the data set gives whole batches.
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
        self.gives_batches = size is None
        self._source = StreamSource(loader, size, seed)
        self.most_ahead = max(4, 2 * numbers.size)
        if self._source.reads_itself:
            self.most_ahead += self._source.num_prefetched
        self._client, self._at = StreamClient(), StreamAt(-1, -1, "", b"")
        self._reader: StreamReader | None = None
        self._pace = Strides()
        self._guess: tuple[int, int] | None = None
        self._over = -1
        """The last pass whose end was reported."""

    link: StreamLink

    @property
    def lookahead(self) -> int:
        """1, so that it is told of its grants; no leases are reserved for it.

        With reserved ones, the mini-batches of an update would depend on when members join; it
        guesses the next number instead.
        """
        return 1

    def notes(self) -> list[str]:
        """The plan's notes about the stream."""
        source, each = self._source, f"{self.samples_each:,} samples"
        what = "a batch of the data set's own" if self._size is None else f"{each} in a row"
        resumes = "from the data set's own state_dict" if source.saves else "by reading it again"
        inside = "" if source.reads_itself else f" and {source.num_prefetched} in loader workers"
        is_cut = self._size is not None and self._size != self.loader.batch_size
        mixed = [
            f"stream: each of {self.loader.num_workers} loader workers makes mini-batches of its "
            f"own, so an update averages {self._parts} of several, not a batch of one; for the "
            "loader's own batches: num_workers=1, or prepare(batch='per-worker')"
        ]
        return [
            *(mixed if is_cut and self.loader.num_workers > 1 else ()),
            f"stream: one worker reads it for all; a mini-batch is {what}, and each is used once",
            f"stream: at most {self.most_ahead} mini-batches are read ahead{inside}; those in use "
            "are kept",
            f"stream: after a death, and with --resume, it goes on {resumes}; "
            "it must give the same samples again",
            "stream: each epoch reads a copy of the data set, as it is when the epoch begins, to "
            "its end; for an endless one use pace.updates(n, loader)",
        ]

    # -- messages of the run --------------------------------------------------------------------

    def hear(self, message: OfStream) -> None:
        if isinstance(message, StreamAt):
            self._at = message
        elif isinstance(message, ReadStream):
            self._read(message)
        else:
            self._client.done_with(*message)

    def _read(self, message: ReadStream) -> None:
        """Start to read this pass for all members."""
        if self._reader is not None:
            self._reader.stop()
        drops_rest = self._size is not None and self.loader.drop_last
        extent = Extent(
            message.epoch, message.first, message.done, message.number, self.most_ahead,
            self._parts if drops_rest else 1,
        )  # fmt: skip
        self._reader = StreamReader(self._source.of(message.epoch, message.state), extent)
        self.link.tell(StreamServed(message.epoch, *self._reader.place))

    def _tell_news(self) -> None:
        """Report to the run what the reading process has sent."""
        reader = self._reader
        while reader is not None:
            try:
                news = reader.news.get_nowait()
            except Empty:
                return
            if isinstance(news, Over):
                self._tell_end(reader.extent.epoch, news.end)
            elif isinstance(news, str):
                self.link.tell(Note(news))
            elif isinstance(news, tuple):
                self.link.tell(StreamState(reader.extent.epoch, *news))

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
        for lease in self._known:
            self._client.ask(lease.epoch, lease.start)

    def fetch(self, lease: Lease) -> Any:
        """The batch of this lease, or ``NOTHING``.

        Raises:
            WorkerError: the stream cannot be read.
        """
        self._tell_news()
        batch = super().fetch(lease)
        if not self._known:
            self._guess_next()
        return batch

    def _guess_next(self) -> None:
        """Request the likely next numbers; drop the last guess if it was wrong."""
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
        """The numbers of the lease that begins with ``first``."""
        return range(first, first + self._num_each)

    def has(self, lease: Lease) -> bool:
        """Whether the stream has this mini-batch, which is read when this returns."""
        answer = self._wait(lease)
        if answer is not None:
            self._client.put_back(lease.epoch, lease.start, answer)
        return isinstance(answer, Received | Broken)

    def num_samples_of(self, lease: Lease) -> int:
        return self._counts.pop(lease.start)

    def fetch_ahead(self) -> None:
        if self._known and self._client.is_here(self._known[0].epoch, self._known[0].start):
            super().fetch_ahead()

    def _load(self, lease: Lease) -> tuple[Any, float | None]:
        answer = self._wait(lease)
        if isinstance(answer, Broken):
            raise WorkerError(answer.text)
        if isinstance(answer, Over):
            self._tell_end(lease.epoch, answer.end)
        if not isinstance(answer, Received):
            return NOTHING, None
        self._counts[lease.start], batch = answer.num_samples, answer.batch
        return (apply(lambda tensor: tensor.pin_memory(), batch) if self._pins else batch), None

    def _wait(self, lease: Lease) -> Received | Over | Gone | Broken | None:
        """Wait for the reader's answer; None: the lease is another member's by now."""
        is_wanted, num_looks = True, 0
        while is_wanted:
            if self._at.epoch != lease.epoch:  # no member reads this pass yet
                is_wanted = self.link.look_for_stream(is_blocking=True)
                continue
            if not self._is_connected():  # the reader has not begun, or is gone
                time.sleep(_LOOK_S)
                num_looks += 1
                is_wanted = self.link.look_for_stream(is_blocking=num_looks > _MOST_LOOKS)
                continue
            answer = self._client.take(lease.epoch, lease.start)
            if answer is not None:
                return answer
            self._tell_news()
            is_wanted = self.link.look_for_stream(is_blocking=False)
        return None

    def _is_connected(self) -> bool:
        """Whether it is connected to the reader; a new connection requests all known leases."""
        if self._client.is_at(self._at.address):
            return True
        if self._client.connect(self._at.address, self._at.key):
            self._ask()
            return True
        return False

    def close(self) -> None:
        self._client.drop()
        self._end_reading()
        super().close()

    def end_epoch(self) -> None:
        self._tell_news()
        self._end_reading()
        self._client.forget_all()
        self._client.drop()  # the reader of the next pass has another address
        self._guess = None
        self._counts.clear()
        super().end_epoch()

    def _end_reading(self) -> None:
        if self._reader is not None:
            self._reader.stop()
            self._reader = None
