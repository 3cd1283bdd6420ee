"""The process that reads a stream for all members of a machine.

    member --begin--> 1  the main thread: the data set, m samples, collate -> what is kept
                      2  a server, with a thread for each member that asks
           <--news--     states of the data set, how far it is, its end
           --stop-->  3  a thread that hears it, or sees that the member is gone

The user's Python, and what is made of what it gives, take nothing from a step: of the member only a
thread is left, which sleeps until there is news. Where the process dies, that thread says so to
whoever asks. This module must not know leases, nor what is done with a mini-batch.
"""

import multiprocessing
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from .serving import Endpoint, StreamServer
from .stream import Answer, Broken, Extent, News, StreamReading, explain_end
from .stream_source import StreamPass

_PATIENCE_S = 2.0
"""For which the end of a pass waits until who reads has heard it."""
_LOOK_S = 5.0
"""How often who reads looks whether the member is there; on Linux it dies with it at once."""


class StreamReader:
    """One pass, read in a process of its own.

    Attributes:
        place: where its mini-batches are given.
        news: what the run should hear of it.
    """

    def __init__(self, of: StreamPass, extent: Extent) -> None:
        self.extent, self.place = extent, Endpoint.new()
        self.news: SimpleQueue[News] = SimpleQueue()
        self._is_stopped = False
        self._stand_in: StreamServer | None = None
        context = of.context or multiprocessing.get_context()
        self._pipe: Connection
        self._pipe, theirs = context.Pipe()
        arguments = (of, extent, self.place, theirs)
        self._process = context.Process(target=_read, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        self._thread = threading.Thread(target=self._hear, name="paceline-stream", daemon=True)
        self._thread.start()

    def _hear(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                self.news.put(self._pipe.recv())
        self._process.join()
        if not self._is_stopped:
            broken = Broken(explain_end(self._process.exitcode))
            self._stand_in = StreamServer(self.place, lambda *_: broken, lambda *_: None)

    def stop(self) -> None:
        """The pass is over."""
        self._is_stopped = True
        with suppress(OSError):
            self._pipe.send(None)
        self._thread.join(_PATIENCE_S)
        if self._thread.is_alive():  # the user's code has not come back
            self._process.kill()
            self._thread.join()
        if self._stand_in is not None:
            self._stand_in.close()
        self.place.remove()
        self._pipe.close()


# -- in the process --------------------------------------------------------------------------------


def _read(of: StreamPass, extent: Extent, place: Endpoint, pipe: Any) -> None:
    """Read, and give what was read, until the member says stop."""
    if not of.reads_itself:
        multiprocessing.current_process().daemon = False  # it has loader workers of its own

    def tell(news: News) -> None:
        with suppress(OSError):  # nobody is there to hear it
            pipe.send(news)

    def find(epoch: int, number: int) -> Answer | None:
        if epoch != extent.epoch:
            reading.wait_for_stop()  # who asks is told of another reader
        return reading.answer(number)

    def done_with(epoch: int, first: int, others: tuple[int, ...]) -> None:
        if epoch == extent.epoch:
            reading.done_with(first, others)

    reading = StreamReading(extent, tell)
    server = StreamServer(place, find, done_with)
    threading.Thread(target=_obey, args=(reading, pipe, os.getppid()), daemon=True).start()
    with suppress(KeyboardInterrupt):  # the member hears it, too
        reading.read(lambda: _in_turn(of, server))
        reading.wait_for_stop()


def _in_turn(of: StreamPass, server: StreamServer) -> Iterator[Any]:
    """Each mini-batch is read on the next core, where those who ask leave none free.

    Left to the scheduler, who reads shares one core with one of them for a whole step; members in
    step wait for that one, and the other cores stand still.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    for number, batch in enumerate(of):
        yield batch
        if 1 < len(cores) <= server.num_asking:
            with suppress(OSError):  # it is no longer allowed there
                os.sched_setaffinity(0, {cores[number % len(cores)]})  # it goes there now,
                os.sched_setaffinity(0, cores)  # and from there wherever it is sent


def _obey(reading: StreamReading, pipe: Any, parent: int) -> None:
    with suppress(EOFError, OSError):
        while not pipe.poll(_LOOK_S):
            if os.getppid() != parent:  # the member, or the fork server that its loader asks for
                os._exit(1)
    reading.stop()
