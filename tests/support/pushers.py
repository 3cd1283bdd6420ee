"""Actions of other processes on a store, in functions that a spawned process can import."""

import os
import signal
import sys
from multiprocessing.connection import Connection

import torch

import paceline
from paceline.kvstore import updaters
from paceline.kvstore.updaters import Change


def push_ones(store: paceline.KVStore, key: str, num_pushes: int) -> None:
    torch.set_num_threads(1)
    like = store.pull(key)
    for _ in range(num_pushes):
        store.push(key, torch.ones_like(like))


def push_until_told(store: paceline.KVStore, key: str, told: Connection) -> None:
    """Push ones until a message arrives; report each of the first pushes."""
    torch.set_num_threads(1)
    ones = torch.ones_like(store.pull(key))
    num_pushes = 0
    while not told.poll():
        store.push(key, ones)
        num_pushes += 1
        if num_pushes <= 10:
            told.send(num_pushes)


def add_key(store: paceline.KVStore, key: str) -> None:
    store.init(key, torch.full((3,), 7.0))


def step_adam(store: paceline.KVStore, gradients: list[list[float]]) -> None:
    torch.set_num_threads(1)
    for gradient in gradients:
        store.push("w", torch.tensor(gradient).repeat(store.pull("w").numel() // len(gradient)))


def die_at(stop: int) -> None:
    """From now on this process is killed after writing elements ``[0, stop)`` of a value."""

    def write(self: updaters.Sum, change: Change) -> None:
        change.new.view(-1)[:stop].fill_(-1)
        os.kill(os.getpid(), signal.SIGKILL)

    updaters.Sum.write = write  # type: ignore[method-assign]


def die_pushing(store: paceline.KVStore, key: str, stop: int) -> None:
    torch.set_num_threads(1)
    die_at(stop)
    store.push(key, torch.ones_like(store.pull(key)))


def die_adding(store: paceline.KVStore) -> None:
    """Die holding the list of keys, with half a key written."""
    directory = store._entries.directory
    with directory.lock:
        directory.take(64, "half a key")
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    push_ones(paceline.KVStore.attach(int(sys.argv[1])), sys.argv[2], int(sys.argv[3]))
