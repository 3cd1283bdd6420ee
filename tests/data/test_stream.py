"""A stream that is read once: what is kept, how far it is read ahead, what each member gets."""

import errno
import json
import os
import random
import signal
import socket
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data._utils import worker

from paceline.data.frames import Frame, decode, encode, pack
from paceline.data.likeness import digest_of
from paceline.data.numbers import Numbers
from paceline.data.reader import StreamReader
from paceline.data.serving import Endpoint, Received, StreamClient, StreamServer
from paceline.data.stream import (
    Answer,
    Broken,
    Extent,
    Gone,
    Over,
    StreamReading,
    explain,
)
from paceline.data.stream_source import StreamSource
from paceline.data.streamed import StreamedLoader
from paceline.errors import ConfigError, WorkerError
from streamed import Stateful, Stream


def _reading(
    batches: Iterable[Any],
    *,
    first: int = 0,
    done: tuple[int, ...] = (),
    number: int = 0,
    most_ahead: int = 3,
    multiple: int = 1,
) -> tuple[StreamReading, "SimpleQueue[Any]"]:
    news: SimpleQueue[Any] = SimpleQueue()
    extent = Extent(0, first, done, number, most_ahead, multiple)
    rows = ((4, torch.tensor([batch]), f"[{batch}]") for batch in batches)
    reading = StreamReading(extent, news.put)
    threading.Thread(target=reading.read, args=(lambda: rows,), daemon=True).start()
    return reading, news


def _read(source: StreamSource, epoch: int = 0, state: str = "") -> list[tuple[int, Any]]:
    """All mini-batches of a pass as a member gets them."""
    reader = StreamReader(source.of(epoch, state), Extent(epoch, 0, (), 0, 100))
    client, results = StreamClient(), list[tuple[int, Any]]()
    while not client.connect(*reader.place):
        pass
    while not isinstance(received := client.take(epoch, len(results)), Over):
        assert received is None or isinstance(received, Received), received
        results += [] if received is None else [(received.num_samples, received.batch)]
    client.drop()
    reader.stop()
    return results


def _value(answer: Answer | None) -> int:
    assert isinstance(answer, Frame)
    return int(decode(answer))


class _Counted:
    """0, 1, ... and how far they were read."""

    def __init__(self, size: int) -> None:
        self.size, self.num_read = size, 0

    def __iter__(self) -> Iterator[int]:
        for number in range(self.size):
            self.num_read += 1
            yield number


def test_each_number_is_its_mini_batch_however_often_it_is_asked_for() -> None:
    reading, _ = _reading(range(10))
    assert [_value(reading.answer(n)) for n in (2, 0, 2, 1, 7, 2)] == [2, 0, 2, 1, 7, 2]
    assert reading.answer(10) == reading.answer(30) == Over(10)
    reading.stop()
    assert reading.answer(3) is None


def test_reading_ahead_stops_at_its_limit() -> None:
    counted = _Counted(1000)
    reading, _ = _reading(counted, most_ahead=3)
    for number in range(100):
        assert _value(reading.answer(number)) == number
        reading.done_with(number + 1, ())
        # One is with the thread, which holds it while it waits.
        assert counted.num_read <= number + 1 + 3 + 1
        assert reading.num_kept <= 3 + 1
    reading.stop()


def test_a_distant_number_is_given_though_earlier_ones_are_not_taken() -> None:
    reading, _ = _reading(range(1000), most_ahead=2)
    assert _value(reading.answer(50)) == 50
    assert _value(reading.answer(3)) == 3
    reading.stop()


def test_batches_used_by_an_update_are_not_kept() -> None:
    reading, _ = _reading(range(20), most_ahead=10)
    assert _value(reading.answer(9)) == 9
    reading.done_with(4, (6, 8))
    assert isinstance(reading.answer(3), Gone)
    assert isinstance(reading.answer(6), Gone)
    assert _value(reading.answer(7)) == 7
    reading.stop()


def test_a_new_reader_keeps_nothing_that_was_used() -> None:
    reading, _ = _reading(range(20), first=5, done=(7,), most_ahead=4)
    assert _value(reading.answer(5)) == 5
    assert isinstance(reading.answer(7), Gone)
    assert isinstance(reading.answer(4), Gone)
    assert _value(reading.answer(19)) == 19
    reading.stop()


def test_a_dropped_remainder_is_given_to_no_member() -> None:
    reading, _ = _reading(range(11), multiple=4, most_ahead=8)
    assert _value(reading.answer(7)) == 7
    assert reading.answer(8) == Over(8)
    reading.stop()


def test_states_come_with_the_number_that_follows_them() -> None:
    reading, news = _reading(range(6), first=2)
    assert reading.answer(6) == Over(6)
    reading.stop()
    assert [news.get() for _ in range(5)] == [
        (2, "[1]"), (3, "[2]"), (4, "[3]"), (5, "[4]"), (6, "[5]"),
    ]  # fmt: skip


def _failing() -> Iterator[int]:
    yield 0
    raise ValueError("it is torn")


def test_batches_read_before_a_failure_are_given_and_then_the_reason() -> None:
    reading, _ = _reading(_failing())
    assert _value(reading.answer(0)) == 0
    broken = reading.answer(1)
    assert isinstance(broken, Broken)
    assert "cannot be read any further: ValueError: it is torn, at " in broken.text
    assert "test_stream.py" in broken.text


def test_an_empty_stream_is_refused() -> None:
    for reading in (_reading([])[0], _reading(range(3), multiple=4)[0]):
        answer = reading.answer(0)
        assert isinstance(answer, Broken)
        assert "the stream of pass 1 has no" in answer.text


@settings(deadline=None, max_examples=40)
@given(size=st.integers(1, 30), asked=st.lists(st.integers(0, 40), max_size=20), seed=st.data())
def test_any_numbers_are_answered(size: int, asked: list[int], seed: st.DataObject) -> None:
    most_ahead = seed.draw(st.integers(1, 5))
    reading, _ = _reading(range(size), most_ahead=most_ahead)
    for number in asked:
        answer = reading.answer(number)
        assert answer == Over(size) if number >= size else _value(answer) == number
    reading.stop()


@pytest.mark.parametrize(
    "batch",
    [
        (torch.arange(6).reshape(2, 3), torch.tensor(2.5)),
        {"ids": torch.ones(2, 0), "mask": torch.tensor([True, False]), "text": ["a", "b"]},
        [torch.ones(2, 2, dtype=torch.bfloat16).t()[:1], None, "x"],
        torch.ones(3).requires_grad_(),
    ],
    ids=["tuple", "dict", "list", "parameter"],
)
def test_a_batch_is_decoded_as_it_was_encoded(batch: Any) -> None:
    for content in (batch, pack(batch)):
        assert digest_of(decode(encode(2, content))) == digest_of(batch)


def test_a_frame_can_be_read_repeatedly_and_each_read_is_a_copy() -> None:
    frame = encode(2, torch.arange(8.0))
    decode(frame).zero_()
    assert decode(frame).tolist() == list(range(8))


@pytest.mark.parametrize("first", [0, 1000])
def test_tensors_that_a_loader_worker_put_into_a_file_stay_there(first: int) -> None:
    whole = [torch.arange(20_000.0) + n for n in range(4)]
    for tensor in whole:
        tensor.share_memory_()
    batch = {"many": [tensor[first:] for tensor in whole], "few": torch.ones(3)}
    expected = [one.clone() for one in batch["many"]]
    frame = encode(4, batch)
    assert [part.file for part in frame.parts] == [0, 1, 2, 0, 0, 0]
    del batch, whole
    for _ in range(2):
        result = decode(frame)
        assert all(map(torch.equal, result["many"], expected))
        assert result["few"].tolist() == [1, 1, 1]
        assert not result["many"][0].is_shared()
        result["many"][0].zero_()


def test_the_file_of_a_frame_is_closed_with_its_last_reference() -> None:
    frame = encode(1, torch.ones(4))
    handle = frame.files[0].handle
    os.fstat(handle)
    del frame
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(handle)


def test_a_truncated_frame_is_detected() -> None:
    frame = encode(1, torch.ones(4))
    os.truncate(frame.files[0].handle, sum(part.size for part in frame.parts) - 1)
    with pytest.raises(EOFError, match="truncated"):
        decode(frame)


def test_an_error_names_the_line_in_the_users_own_code() -> None:
    text = (
        "Caught KeyError in DataLoader worker process 0.\nOriginal Traceback:\n"
        f'  File "{torch.__file__}", line 3, in fetch\n  File "/home/me/data.py", line 7, in read\n'
        "KeyError: 'label'"
    )
    message = explain(RuntimeError(text))
    assert message.splitlines()[0] == (
        "the stream cannot be read any further: KeyError: 'label', at /home/me/data.py:7 in read"
    )


def test_a_client_without_the_key_is_given_nothing() -> None:
    place = Endpoint.new()
    server = StreamServer(place, lambda epoch, number: Over(3), lambda *_: None)
    assert not StreamClient().connect(place.address, b"another")
    client = StreamClient()
    assert client.connect(*place)
    assert client.take(0, 5) == Over(3)
    server.close()


def test_a_member_gets_copies_and_reports_used_numbers() -> None:
    told: list[Any] = []
    batch = torch.arange(40_000).reshape(2, -1)
    place, client = Endpoint.new(), StreamClient()
    server = StreamServer(
        place, lambda e, n: encode(2, (batch, n)), lambda *args: told.append(args)
    )  # fmt: skip
    client.connect(*place)
    client.done_with(0, 4, (6,))
    for number in (4, 5):  # asked for before it is taken
        client.ask(0, number)
    for number in (4, 5, 7):
        result = None
        while result is None:
            result = client.take(0, number)
        assert isinstance(result, Received)
        assert torch.equal(result.batch[0], batch)
        assert result.batch[1] == number
        result.batch[0].zero_()
    assert told == [(0, 4, (6,))]
    server.close()


def test_a_server_continues_after_a_failed_accept(monkeypatch: pytest.MonkeyPatch) -> None:
    accept, failures = Listener.accept, [OSError(errno.EMFILE, os.strerror(errno.EMFILE))]

    def fail_once(listener: Listener) -> "Connection[Any, Any]":
        if failures:
            raise failures.pop()
        return accept(listener)

    monkeypatch.setattr(Listener, "accept", fail_once)
    place, client, answer = Endpoint.new(), StreamClient(), None
    server = StreamServer(place, lambda epoch, number: Over(3), lambda *_: None)
    assert client.connect(*place)
    while answer is None:
        answer = client.take(0, 5)
    assert answer == Over(3)
    assert not failures
    server.close()


def test_a_server_replaces_the_socket_file_of_a_killed_one() -> None:
    with tempfile.TemporaryDirectory() as folder:  # a path of pytest's may be too long for a socket
        place = Endpoint(f"{folder}/stream", b"key")
        with socket.socket(socket.AF_UNIX) as killed:
            killed.bind(place.address)
        server, client = StreamServer(place, lambda *_: Over(3), lambda *_: None), StreamClient()
        assert client.connect(*place)
        server.close()


def test_a_member_without_a_free_file_handle_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    place, client = Endpoint.new(), StreamClient()
    server = StreamServer(place, lambda *_: encode(1, torch.ones(2)), lambda *_: None)
    assert client.connect(*place)

    def cut(way: socket.socket, *_: int) -> tuple[bytes, list[int], int, None]:
        return way.recv(1), [], socket.MSG_CTRUNC, None

    monkeypatch.setattr(socket, "recv_fds", cut)
    client.ask(0, 0)
    assert client._connection is not None
    client._connection.poll(None)
    with pytest.raises(WorkerError, match="no file handle left"):
        client.take(0, 0)
    server.close()


def test_members_that_ask_concurrently_get_each_number_once() -> None:
    reading, _ = _reading(range(60), most_ahead=4)
    place = Endpoint.new()
    server = StreamServer(place, lambda _, number: reading.answer(number), lambda *_: None)
    got: dict[int, list[int]] = {0: [], 1: []}

    def ask(member: int) -> None:
        client = StreamClient()
        client.connect(*place)
        for number in range(member, 60, 2):
            result = None
            while result is None:
                result = client.take(0, number)
            assert isinstance(result, Received)
            got[member].append(int(result.batch))

    threads = [threading.Thread(target=ask, args=(member,)) for member in got]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == {0: list(range(0, 60, 2)), 1: list(range(1, 60, 2))}
    reading.stop()
    server.close()


# -- the loader's workers --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_workers", "context"),
    [(0, None), (1, "fork"), (1, "spawn"), (1, "forkserver"), (2, "fork")],
)
def test_the_reader_gives_the_loaders_own_batches(num_workers: int, context: str | None) -> None:
    loader = DataLoader(
        Stream(23), batch_size=4, num_workers=num_workers, multiprocessing_context=context
    )
    source = StreamSource(loader, 4, 1)
    for (count, mine), other in zip(_read(source), loader, strict=True):
        assert count == len(mine[0])
        torch.testing.assert_close(mine, other)


def test_a_state_continues_with_the_next_mini_batch() -> None:
    source = StreamSource(DataLoader(Stateful(20), batch_size=2), 2, 1)
    assert source.saves
    state = _first_state(source)
    assert json.loads(state)[0] == {"position": 2}
    torch.testing.assert_close(_read(source, 0, state), _read(source)[1:])


def _first_state(source: StreamSource) -> str:
    reader = StreamReader(source.of(0, ""), Extent(0, 0, (), 0, 100))
    number, state = reader.news.get()  # type: ignore[misc]  # the first of its news
    reader.stop()
    assert number == 1
    return str(state)


class _Odd(Stateful):
    """Its state does not survive JSON."""

    def state_dict(self) -> Any:
        return {0: self.position}


@pytest.mark.parametrize(
    ("dataset", "samples", "is_saved"),
    [(Stateful(3), [1, 2], True), (Stateful(3), [1], False), (_Odd(3), [1, 2], False)],
    ids=["whole", "short", "not JSON"],
)
def test_a_state_that_cannot_be_restored_is_not_saved(
    dataset: Any, samples: list[int], is_saved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = worker.WorkerInfo(id=0, num_workers=1, seed=0, dataset=dataset)
    monkeypatch.setattr(worker, "_worker_info", info)
    collate = StreamSource(DataLoader(dataset, batch_size=2), 2, 0).of(0, "").collate
    assert bool(collate(samples)[2]) == is_saved


class BufferShuffledExamples:
    pass


class _Mapped:
    ex_iterable = BufferShuffledExamples()


class _Mixed:
    ex_iterables = (object(), _Mapped())


class _Tables:
    is_table = True


class _MappedTables:
    ex_iterable, formatting, batched = object(), _Tables(), True


@pytest.mark.parametrize(
    "part", [_Mapped(), _Mixed(), _MappedTables()], ids=lambda one: type(one).__name__
)
def test_an_incomplete_state_is_not_used(part: Any) -> None:
    dataset = Stateful(4)
    assert StreamSource(DataLoader(dataset, batch_size=2), 2, 1).saves
    dataset._ex_iterable = part  # type: ignore[attr-defined]
    assert not StreamSource(DataLoader(dataset, batch_size=2), 2, 1).saves


def test_several_loader_workers_have_no_single_state() -> None:
    assert not StreamSource(DataLoader(Stateful(4), batch_size=2, num_workers=2), 2, 1).saves


class _Random(IterableDataset[Any]):
    """Its samples are drawn by all three generators; it counts them."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[Any]:
        while self.position < 6:
            self.position += 1
            yield torch.rand(1) + random.random() + numpy.random.rand()

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def test_draws_follow_from_seed_and_pass_also_when_resumed() -> None:
    def drawn(seed: int, epoch: int, state: str = "") -> list[float]:
        source = StreamSource(DataLoader(_Random(), batch_size=2), 2, seed)
        return torch.cat([batch for _, batch in _read(source, epoch, state)]).flatten().tolist()

    state = _first_state(StreamSource(DataLoader(_Random(), batch_size=2), 2, 1))
    assert drawn(1, 0, state) == drawn(1, 0)[2:]
    before = torch.get_rng_state()
    assert drawn(1, 0) == drawn(1, 0) != drawn(1, 1)
    assert drawn(2, 0) != drawn(1, 0)
    assert torch.equal(before, torch.get_rng_state())


class _Told(IterableDataset[Any]):
    """Gives the info of its loader worker."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        assert type(info.dataset) is _Told
        drawn = torch.rand(1).item(), random.random()
        yield torch.tensor([info.id, info.num_workers, info.seed, torch.get_num_threads(), *drawn])


def test_get_worker_info_is_that_of_torchs_own_loader_worker() -> None:
    def of(timeout_s: float) -> Any:
        loader = DataLoader(_Told(), num_workers=1, timeout=timeout_s, batch_size=1)
        return StreamSource(loader, 1, 3)

    assert of(0).reads_itself
    assert not of(60).reads_itself  # torch's queue keeps the time
    torch.testing.assert_close(_read(of(0)), _read(of(60)), rtol=0, atol=0)


class _Slow(IterableDataset[Any]):
    """Never yields."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __iter__(self) -> Iterator[Any]:
        with self.file.open("a") as file:
            file.write(f"{os.getpid()} ")
        threading.Event().wait()
        yield torch.zeros(1)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_stuck_reader_and_its_loader_workers_are_ended(tmp_path: Path, num_workers: int) -> None:
    loader = DataLoader(_Slow(tmp_path / "pids"), batch_size=1, num_workers=num_workers)
    reader = StreamReader(StreamSource(loader, 1, 0).of(0, ""), Extent(0, 0, (), 0, 3))
    while len(pids := _words_of(tmp_path / "pids")) < num_workers:
        pass
    reader.stop()
    for pid in map(int, pids):
        with suppress(psutil.NoSuchProcess):
            assert psutil.Process(pid).wait(4) is None  # before torch's own look, each 5 s


def _words_of(file: Path) -> list[str]:
    return file.read_text().split() if file.exists() else []


class _Cleaning(IterableDataset[Any]):
    """Cleans up after itself, whoever else reads."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from torch.zeros(1000, 1)
        finally:
            self.file.write_text("clean")


def test_an_abandoned_pass_cleans_up(tmp_path: Path) -> None:
    source = StreamSource(DataLoader(_Cleaning(tmp_path / "end"), batch_size=1), 1, 0)
    reader = StreamReader(source.of(0, ""), Extent(0, 0, (), 0, 3))
    client = StreamClient()
    while not client.connect(*reader.place):
        pass
    while client.take(0, 5) is None:
        pass
    reader.stop()
    assert (tmp_path / "end").read_text() == "clean"


def test_the_death_of_a_reader_is_reported_to_members_that_ask() -> None:
    class Killed(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            yield torch.zeros(1)
            os.kill(os.getpid(), signal.SIGKILL)

    reader = StreamReader(
        StreamSource(DataLoader(Killed(), batch_size=1), 1, 0).of(0, ""), Extent(0, 0, (), 0, 3)
    )
    client, result = StreamClient(), None
    while result is None:
        if client.is_at(reader.place.address) or client.connect(*reader.place):
            result = client.take(0, 1)
    reader.stop()
    assert result == Broken(
        "the stream cannot be read any further: the DataLoader worker that read it is gone "
        "(killed by SIGKILL)"
    )


def test_a_stream_that_cannot_be_shared_is_refused_in_one_sentence() -> None:
    def prepare(size: int | None, parts: int, *, is_global: bool = True) -> StreamedLoader:
        loader = DataLoader(Stream(9), batch_size=size)
        return StreamedLoader(
            loader, 0, torch.device("cpu"), numbers=Numbers(parts), is_global=is_global
        )

    with pytest.raises(ConfigError, match="batch of 10 samples cannot be shared by 4"):
        prepare(10, 4)
    with pytest.raises(ConfigError, match=r"batch='per-worker'"):
        prepare(None, 2)
    assert prepare(10, 4, is_global=False).samples_each == 10
    assert prepare(None, 2, is_global=False).samples_each == 1
    assert prepare(12, 4).samples_each == 3
