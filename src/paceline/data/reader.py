"""The process that reads a stream for all members of a machine.

    member --start--> 1  the main thread: data set, m samples, collate -> kept mini-batches
                      2  a server, with a thread for each client
           <--news--     states of the data set, progress, its end
           --stop-->  3  a thread that waits for it, or notices that the member is gone

The user's code and the encoding of batches run outside the member, so they take no time from its
steps; the member only has a thread that sleeps until there is news. If the process dies, that
thread tells all clients. This module must not know leases, nor what is done with a mini-batch.
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
"""How long ``stop`` waits for the reading process before it kills it."""
_LOOK_S = 5.0
"""How often the process checks that its member is alive; on Linux it dies with it at once."""


class StreamReader:
    """One pass, read in a process of its own.

    Attributes:
        place: the address of its server.
        news: what to report to the run.
    """

    def __init__(self, of: StreamPass, extent: Extent) -> None:
        self.extent, self.place = extent, Endpoint.new()
        self.news: SimpleQueue[News] = SimpleQueue()
        self._is_stopped = False
        self._stand_in: StreamServer | None = None
        context = of.context or multiprocessing.get_context()
        self._pipe: Connection
        self._pipe, child_pipe = context.Pipe()
        arguments = (of, extent, self.place, child_pipe)
        self._process = context.Process(target=_read, args=arguments, daemon=True)
        self._process.start()
        child_pipe.close()
        self._thread = threading.Thread(
            target=self._receive_news, name="paceline-stream", daemon=True
        )
        self._thread.start()

    def _receive_news(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                self.news.put(self._pipe.recv())
        self._process.join()
        if not self._is_stopped:
            broken = Broken(explain_end(self._process.exitcode))
            self._stand_in = StreamServer(self.place, lambda *_: broken, lambda *_: None)

    def stop(self) -> None:
        """End the pass and its process."""
        self._is_stopped = True
        with suppress(OSError):
            self._pipe.send(None)
        self._thread.join(_PATIENCE_S)
        if self._thread.is_alive():  # the user's code does not return
            self._process.kill()
            self._thread.join()
        if self._stand_in is not None:
            self._stand_in.close()
        self.place.remove()
        self._pipe.close()


# -- in the process --------------------------------------------------------------------------------


def _read(of: StreamPass, extent: Extent, place: Endpoint, pipe: Any) -> None:
    """Read the pass and serve its mini-batches until the member sends stop."""
    if not of.reads_itself:
        multiprocessing.current_process().daemon = False  # it has loader workers of its own

    def tell(news: News) -> None:
        with suppress(OSError):  # the member is gone
            pipe.send(news)

    def find(epoch: int, number: int) -> Answer | None:
        if epoch != extent.epoch:
            reading.wait_for_stop()  # the run tells the client of another reader
        return reading.answer(number)

    def done_with(epoch: int, first: int, others: tuple[int, ...]) -> None:
        if epoch == extent.epoch:
            reading.done_with(first, others)

    reading = StreamReading(extent, tell)
    server = StreamServer(place, find, done_with)
    threading.Thread(target=_wait_for_stop, args=(reading, pipe, os.getppid()), daemon=True).start()
    with suppress(KeyboardInterrupt):  # the member gets it, too
        reading.read(lambda: _on_each_core(of, server))
        reading.wait_for_stop()


def _on_each_core(of: StreamPass, server: StreamServer) -> Iterator[Any]:
    """Read each mini-batch on the next core in turn, if there are as many clients as cores.

    Left to the scheduler, the reader shares one core with one member for a whole step; members in
    step wait for that one, and the other cores are idle.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    for number, batch in enumerate(of):
        yield batch
        if 1 < len(cores) <= server.num_asking:
            with suppress(OSError):  # the core is no longer allowed
                os.sched_setaffinity(0, {cores[number % len(cores)]})  # move there now,
                os.sched_setaffinity(0, cores)  # then let the scheduler decide again


def _wait_for_stop(reading: StreamReading, pipe: Any, parent: int) -> None:
    with suppress(EOFError, OSError):
        while not pipe.poll(_LOOK_S):
            if os.getppid() != parent:  # the member, or the loader's fork server
                os._exit(1)
    reading.stop()
