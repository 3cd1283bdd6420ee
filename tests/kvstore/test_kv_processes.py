"""A store shared by threads and processes: nothing is lost, torn or blocked by a death."""

import contextlib
import multiprocessing
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import reduction
from pathlib import Path

import pytest
import torch

import pushers
from paceline import KVStore, LinkError
from paceline.kvstore import entries, index
from paceline.kvstore.updaters import Change, Sum

SMALL, LARGE = 100, 2**18
"""Elements of float64 values."""

server = multiprocessing.get_context("forkserver")
server.set_forkserver_preload(["torch", "paceline", "pushers"])  # imported once for all processes
Start = Callable[..., multiprocessing.process.BaseProcess]


@pytest.fixture
def start() -> Iterator[Start]:
    started = []

    def run(target: Callable[..., None], *args: object, context: str = "forkserver") -> object:
        process = multiprocessing.get_context(context).Process(target=target, args=args)  # type: ignore[attr-defined]
        process.start()
        started.append(process)
        return process

    yield run  # type: ignore[misc]
    for process in started:
        process.kill()
        process.join()


def zeros(numel: int) -> torch.Tensor:
    return torch.zeros(numel, dtype=torch.float64)


def ones(numel: int) -> torch.Tensor:
    return torch.ones(numel, dtype=torch.float64)


@pytest.mark.parametrize("has_mutexes", [True, False])
@pytest.mark.parametrize("numel", [SMALL, LARGE])
def test_pushes_of_threads_add_up(
    numel: int, has_mutexes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "HAS_MUTEXES", has_mutexes and index.HAS_MUTEXES)
    with KVStore(capacity_bytes=2**26) as store:
        store.init("w", zeros(numel))
        threads = [
            threading.Thread(target=lambda: [store.push("w", ones(numel)) for _ in range(50)])
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (store.pull("w") == 200).all()
        assert store.version("w") == 200


@pytest.mark.parametrize(
    ("numel", "context"),
    [(SMALL, "fork"), (SMALL, "spawn"), (LARGE, "fork"), (LARGE, "forkserver")],
)
def test_pushes_of_processes_add_up(store: KVStore, start: Start, numel: int, context: str) -> None:
    store.init("w", zeros(numel))
    processes = [start(pushers.push_ones, store, "w", 100, context=context) for _ in range(2)]
    pushers.push_ones(store, "w", 100)
    for process in processes:
        process.join()
    assert (store.pull("w") == 300).all()
    assert store.version("w") == 300


def test_subprocess_attaches_by_descriptor(store: KVStore) -> None:
    store.init("w", zeros(LARGE))
    command = [sys.executable, pushers.__file__, str(store.fd), "w", "3"]
    subprocess.run(command, pass_fds=[store.fd], check=True)
    assert (store.pull("w") == 3).all()


def test_descriptor_can_be_sent_over_a_socket(store: KVStore) -> None:
    store.init("w", torch.ones(2))
    near, far = socket.socketpair()
    with near, far:
        socket.send_fds(near, [b"store"], [store.fd])
        (fd,) = socket.recv_fds(far, 16, 1)[1]
    with KVStore.attach(fd) as other:
        other.push("w", torch.ones(2))
    assert torch.equal(store.pull("w"), torch.full((2,), 2.0))


def test_store_can_be_pickled_between_processes(store: KVStore) -> None:
    store.init("w", torch.ones(2))
    other = reduction.ForkingPickler.loads(reduction.ForkingPickler.dumps(store))
    other.push("w", torch.ones(2))
    assert store.version("w") == 1
    other.close()


def test_any_process_may_add_keys(store: KVStore, start: Start) -> None:
    process = start(pushers.add_key, store, "theirs")
    process.join()
    assert store.keys() == ["theirs"]
    assert torch.equal(store.pull("theirs"), torch.full((3,), 7.0))


@pytest.mark.parametrize(("numel", "has_order"), [(SMALL, True), (LARGE, True), (LARGE, False)])
def test_pull_during_heavy_pushes_is_never_torn(
    store: KVStore, start: Start, monkeypatch: pytest.MonkeyPatch, numel: int, has_order: bool
) -> None:
    """Also if the processor may reorder writes, and a pull asks pushes to wait."""
    monkeypatch.setattr(entries, "HAS_ORDER", has_order and entries.HAS_ORDER)
    store.init("w", zeros(numel))
    ours, theirs = server.Pipe()
    process = start(pushers.push_until_told, store, "w", theirs)
    assert ours.recv() == 1
    out, newest = zeros(numel), 0
    while newest < 200:
        before = store.version("w")
        store.pull("w", out=out)
        first = int(out[0])
        assert (out == first).all()
        assert max(before, newest) <= first <= store.version("w")
        newest = first
        store.push("w", ones(numel))
    ours.send("stop")
    process.join()


# -- deaths ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numel", "stop"), [(SMALL, 0), (SMALL, SMALL), (LARGE, LARGE // 2), (LARGE, LARGE)]
)
def test_killed_pusher_changes_nothing_and_blocks_nobody(
    store: KVStore, start: Start, numel: int, stop: int
) -> None:
    store.init({"w": zeros(numel), "v": zeros(SMALL)})
    store.push("w", ones(numel))
    process = start(pushers.die_pushing, store, "w", stop)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert (store.pull("w") == 1).all()
    for number in range(2, 6):
        assert store.push("w", ones(numel)) == number
        store.push("v", ones(SMALL))
    assert (store.pull("w") == 5).all()
    assert (store.pull("v") == 4).all()


def test_pushers_killed_at_any_time_leave_complete_versions(store: KVStore, start: Start) -> None:
    store.init("w", zeros(LARGE))
    ours, theirs = server.Pipe()
    steady = start(pushers.push_until_told, store, "w", theirs)
    for number in range(4):
        mine, victims = server.Pipe()
        victim = start(pushers.push_until_told, store, "w", victims)
        for _ in range(1 + number):
            mine.recv()
        victim.kill()
        victim.join()
        assert victim.exitcode == -signal.SIGKILL
        store.push("w", ones(LARGE))
        value = store.pull("w")
        assert (value == value[0]).all()
    ours.send("stop")
    steady.join()
    assert (store.pull("w") == store.version("w")).all()


def test_push_after_a_lost_one_adds_to_the_newest_complete_version(
    store: KVStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.init("w", zeros(LARGE))
    is_held, may_fail, plain = threading.Event(), threading.Event(), Sum.write

    def write(self: Sum, change: Change) -> None:
        if change.pushed[0] == 100:
            change.new.view(-1)[: LARGE // 2].fill_(-1)
            is_held.set()
            may_fail.wait(30)
            raise ValueError("lost")
        plain(self, change)

    monkeypatch.setattr(Sum, "write", write)

    def lose() -> None:
        with pytest.raises(ValueError, match="lost"):
            store.push("w", 100 * ones(LARGE))

    first = threading.Thread(target=lose)
    first.start()
    is_held.wait(30)
    second = threading.Thread(target=store.push, args=("w", ones(LARGE)))
    second.start()
    assert (store.pull("w") == 0).all()
    may_fail.set()
    first.join()
    second.join()
    assert (store.pull("w") == 1).all()
    assert store.version("w") == 1


@pytest.mark.parametrize("num_shards", [1, 2])
def test_pushes_to_keys_of_other_shards_do_not_wait(num_shards: int) -> None:
    with KVStore(num_shards=num_shards, capacity_bytes=2**20, patience_s=0.05) as store:
        go_on, is_held = threading.Event(), threading.Event()

        def hold(key: str, pushed: torch.Tensor, stored: torch.Tensor) -> None:
            if key == "v":
                is_held.set()
                go_on.wait(30)

        store.init({"v": zeros(SMALL), "w": zeros(SMALL)})
        store.set_updater(hold)
        thread = threading.Thread(target=store.push, args=("v", ones(SMALL)))
        thread.start()
        is_held.wait(30)
        with pytest.raises(LinkError) if num_shards == 1 else contextlib.nullcontext():
            assert store.push("w", ones(SMALL)) == 1
        go_on.set()
        thread.join()


def test_process_that_dies_adding_a_key_blocks_nobody(store: KVStore, start: Start) -> None:
    store.init("v", torch.zeros(2))
    process = start(pushers.die_adding, store)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    store.init("w", torch.zeros(2))
    assert store.keys() == ["v", "w"]


@pytest.mark.parametrize("has_mutexes", [True, False])
def test_process_holding_a_shard_too_long_is_named(
    has_mutexes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "HAS_MUTEXES", has_mutexes and index.HAS_MUTEXES)
    with KVStore(num_shards=1, capacity_bytes=2**20, patience_s=0.05) as store:
        store.init("w", torch.zeros(2))
        go_on, is_held = threading.Event(), threading.Event()

        def hold(key: str, pushed: torch.Tensor, stored: torch.Tensor) -> None:
            is_held.set()
            go_on.wait(30)

        store.set_updater(hold)
        thread = threading.Thread(target=store.push, args=("w", torch.ones(2)))
        thread.start()
        is_held.wait(30)
        with pytest.raises(LinkError, match=r"shard 0 of the store .* by process \d+ for 0.05 s"):
            store.push("w", torch.ones(2))
        go_on.set()
        thread.join()
        assert store.push("w", torch.ones(2)) == 2


@pytest.mark.skipif(not index.HAS_MUTEXES, reason="no mutex of the C library is used here")
@pytest.mark.parametrize("has_died", [False, True])
def test_ctrl_c_at_the_moment_of_a_lock_leaves_it_free(
    has_died: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other case: its holder has died, and this thread has not yet declared it whole."""
    take, consistent = index.MutexLock._take, index._c.pthread_mutex_consistent

    def take_and_interrupt(lock: index.MutexLock, wait_s: float) -> bool:
        monkeypatch.setattr(index.MutexLock, "_take", take)
        assert take(lock, wait_s)
        raise KeyboardInterrupt

    def interrupt(mutex: object) -> None:
        monkeypatch.setattr(index._c, "pthread_mutex_consistent", consistent)
        raise KeyboardInterrupt

    with KVStore(num_shards=1, capacity_bytes=2**20, patience_s=0.5) as store:
        store.init("w", torch.zeros(2))
        if has_died:
            shard = store._entries.directory.shards[0]
            thread = threading.Thread(target=shard._take, args=(0.0,))
            thread.start()
            thread.join()
            monkeypatch.setattr(index._c, "pthread_mutex_consistent", interrupt)
        else:
            monkeypatch.setattr(index.MutexLock, "_take", take_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            store.push("w", torch.ones(2))
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(store.push, "w", torch.ones(2)).result() == 1
        assert store.push("w", torch.ones(2)) == 2


@pytest.mark.skipif(not index.HAS_MUTEXES, reason="no mutex of the C library is used here")
def test_directory_is_read_under_its_lock_without_write_ordering(
    store: KVStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The count of bytes may be visible before the bytes."""
    monkeypatch.setattr(index, "HAS_ORDER", False)
    writer = store._entries.directory
    reader = index.Directory(store._entries.region, patience_s=0.05)
    with writer.lock:
        writer.append([{"rule": "another"}])
        with ThreadPoolExecutor(1) as pool, pytest.raises(LinkError, match="the list of keys of"):
            pool.submit(reader.refresh).result()
    reader.refresh()
    assert reader.rule == "another"


@pytest.mark.skipif(
    not hasattr(index._c, "pthread_mutex_clocklock"), reason="here it waits by a clock that is set"
)
@pytest.mark.timeout(30)
def test_setting_the_clock_back_does_not_extend_a_wait(
    store: KVStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a deadline from before the change, a wait of 50 ms would take an hour."""
    directory = index.Directory(store._entries.region, patience_s=0.05)
    before_s = time.time()
    monkeypatch.setattr(time, "time", lambda: before_s + 3600.0)
    refused = pytest.raises(LinkError, match=r"by process \d+ for 0.05 s")
    with store._entries.directory.lock, ThreadPoolExecutor(1) as pool, refused:
        pool.submit(directory.lock.__enter__).result()


def test_killed_process_leaves_no_files() -> None:
    before = set(Path("/dev/shm").iterdir()) if Path("/dev/shm").exists() else set()
    code = (
        "import torch, paceline; s = paceline.KVStore(); s.init('w', torch.zeros(9));"
        "import os; os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code], check=False)
    after = set(Path("/dev/shm").iterdir()) if Path("/dev/shm").exists() else set()
    assert not [path for path in after - before if "paceline" in path.name]
