"""The batches of leases, where a lease is a mini-batch of a stream: a number.

    lease = number, or several -> client -> who reads (this member, or another) -> batch
                                     |
                                     nothing there: the stream is over, or the work is another's

In the run one member is told to read; each is told where. What a member learns on the way, that the
stream is over or where the data set is, it tells the run. This module must not know who decides
that, nor what a step does with a batch.
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
"""Between two looks for who reads; and how often, before the next message of the run is awaited."""


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
        inside = "" if source.reads_itself else f" and {source.num_prefetched} in loader workers"
        return [
            f"stream: one worker reads it for all; a mini-batch is {what}, and each is used once",
            f"stream: at most {self.most_ahead} mini-batches are read ahead{inside}, and those at "
            "work are kept",
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
        """What the process that reads has found."""
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
        is_wanted, num_looks = True, 0
        while is_wanted:
            if self._at.epoch != lease.epoch:  # nobody reads this pass yet
                is_wanted = self.link.look_for_stream(is_blocking=True)
                continue
            if not self._is_connected():  # who reads has not begun, or is gone
                time.sleep(_LOOK_S)
                num_looks += 1
                is_wanted = self.link.look_for_stream(is_blocking=num_looks > _MOST_LOOKS)
                continue
            found = self._client.take(lease.epoch, lease.start)
            if found is not None:
                return found
            self._tell_news()
            is_wanted = self.link.look_for_stream(is_blocking=False)
        return None

    def _is_connected(self) -> bool:
        """Whether it asks who reads now; all that is known to come is asked for at once."""
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
        self._client.drop()  # who reads the next pass is asked elsewhere
        self._guess = None
        self._counts.clear()
        super().end_epoch()

    def _end_reading(self) -> None:
        if self._reader is not None:
            self._reader.stop()
            self._reader = None
