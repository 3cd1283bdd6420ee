"""Read the whole of a spread model: its parameters, buffers and optimizer state by their names.

    worker 1  asks "conv1.weight, version 7"  ->  queue of worker 0  ->  thread: is it at 7?
                                                  -> worker 0's part of it

Only the worker that wants the whole model does anything: a thread of each other worker hands out
its part while it waits or computes, from memory that does not change meanwhile (`PartVersion`). No
worker can be ahead of the one that asks, since every update needs all of them. Tensors are fetched
one after the other, and files and checkpoints written likewise, since a worker may not have memory
for all. This module must not know who wants the model.
"""

import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..errors import LinkError
from ..store.layout import Layout, StateEntry, TensorPlace, lay_out
from ..store.optimizer_copy import EXISTS
from .group import SplitGroups, tell_all

_REQUEST = struct.Struct("<qqq")
"""The number of the worker that asks, the version, and the number of the place there."""
_STOP = b"-"
_TAG = 11

StateValue: TypeAlias = Tensor | int | float
ReadBlock = Callable[[], tuple[Tensor, Tensor | None]]


class PartVersion:
    """The version of this worker's part, and whether it may be read now."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._version: int | None = None

    def stands(self, version: int) -> None:
        """Note that the part is at a version, and does not change for now."""
        with self._changed:
            self._version = version
            self._changed.notify_all()

    def changes(self) -> None:
        """Begin an update, once no thread reads."""
        with self._changed:
            self._version = None

    @contextmanager
    def at(self, version: int) -> Iterator[None]:
        """Wait for a version, and keep the part at it in a block."""
        with self._changed:
            self._changed.wait_for(lambda: self._version is not None and self._version >= version)
            yield


class SpreadState:
    """The parts of all workers of a copy, as one model.

    Args:
        layout: of this worker's part.
        whole: parameters and buffers of the model, in its order, without memory.
        grouped: names of parameters, in the order of the optimizers' groups.
        read: returns this worker's block at its current version, and its buffers if they lie apart.
        starts: for parameters of which this worker holds a piece, where it begins in the whole: in
            elements, or, if it has as many dimensions as the whole, in the one that is divided.

    Attributes:
        standing: the version of this worker's part.
        layout: of the whole model, as one worker alone would have it.
    """

    def __init__(
        self,
        groups: SplitGroups,
        layout: Layout,
        whole: tuple[Sequence[tuple[str, Tensor]], Sequence[tuple[str, Tensor]]],
        grouped: Sequence[str],
        read: ReadBlock,
        starts: Mapping[str, int],
    ) -> None:
        self.standing = PartVersion()
        self._groups, self._own, self._read = groups, layout, read
        parts = tell_all(groups.copy, {**_plain(layout), "starts": dict(starts)})
        self._places = [[_place(row) for row in part["places"]] for part in parts]
        self._starts: list[dict[str, int]] = [_piece_starts(part) for part in parts]
        """For each worker, where its places that are pieces begin, those of state included."""
        self._number_of = [
            {place.name: number for number, place in enumerate(places)} for places in self._places
        ]
        self._names = [name for name, _ in whole[0]]
        self.layout = self._lay_out(parts, whole, grouped)
        self._name_of = {
            entry.place: f"{self._names[entry.parameter]}/{entry.key}"
            for entry in self.layout.entries
        }
        """The names of places of state in the parts."""
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._words = groups.ranks.words()
        self._thread.start()

    def _lay_out(
        self,
        parts: Sequence[Mapping[str, Any]],
        whole: tuple[Sequence[tuple[str, Tensor]], Sequence[tuple[str, Tensor]]],
        grouped: Sequence[str],
    ) -> Layout:
        """Return the layout of the whole, with state as the first worker that has it keeps it."""
        parameters = dict(whole[0])
        number_of = {name: number for number, name in enumerate(self._names)}
        states: dict[str, dict[str, tuple[TensorPlace, bool]]] = {}
        for part, places in zip(parts, self._places, strict=True):
            by_name = {place.name: place for place in places}
            for name, key, is_number in part["entries"]:
                state = states.setdefault(name, {})
                place = by_name[f"{name}/{key}"]
                if f"{name}/{key}" in _piece_starts(part):
                    place = _as_whole(place, parameters[name])
                state.setdefault(key, (place, is_number))
        entries = [
            (number_of[name], key, place.without_memory(), is_number)
            for name in grouped
            for key, (place, is_number) in states.get(name, {}).items()
        ]
        return lay_out(whole[0], whole[1], entries)

    # -- asking ---------------------------------------------------------------------------------

    def fetch(self, place: TensorPlace, version: int) -> Tensor:
        """Return the tensor at a place of the whole layout, at a version, and fetch no other."""
        copy, name = self._groups.copy, self._name_of.get(place, place.name)
        target = replace(place, offset=0)
        out = torch.zeros(target.num_bytes, dtype=torch.uint8)
        if not target.numel:
            return target.view(out)
        holders = [worker for worker in range(copy.size) if name in self._number_of[worker]]
        if name not in self._starts[holders[0]]:  # each has all of it
            holders = [copy.rank] if copy.rank in holders else holders[:1]
        for holder in holders:
            number = self._number_of[holder][name]
            piece = replace(self._places[holder][number], offset=0)
            start = self._starts[holder].get(name)
            _put(piece, start, self._bytes_of(holder, number, version), target, out)
        return target.view(out)

    def _bytes_of(self, holder: int, number: int, version: int) -> Tensor:
        """Return the bytes of one of a worker's places."""
        if holder == self._groups.copy.rank:
            return self._own_bytes_of(number)
        self._ask(holder, version, number)
        block = torch.empty(self._places[holder][number].num_bytes, dtype=torch.uint8)
        self._groups.asks.begin_receive(block, holder, _TAG).wait()
        return block

    def _own_bytes_of(self, number: int) -> Tensor:
        """Return a copy of the bytes of one of this worker's places."""
        place, buffers = self._places[self._groups.copy.rank][number], self._own.buffers
        block, apart = self._read()
        if apart is not None and buffers.start <= place.offset < buffers.stop:
            place, block = replace(place, offset=place.offset - buffers.start), apart
        return place.flat(block).view(torch.uint8).to("cpu", copy=True)

    def _ask(self, holder: int, version: int, number: int) -> None:
        seat = self._groups.members[holder]
        request = _REQUEST.pack(self._groups.copy.rank, version, number)
        self._words.queue_push(f"asks/{seat}", request)

    # -- handing out ----------------------------------------------------------------------------

    def _serve(self) -> None:
        words, asks = self._groups.ranks.words(), self._groups.asks
        while True:
            try:
                request = words.queue_pop(f"asks/{self._groups.seat}")
                if request == _STOP:
                    return
                asker, version, number = _REQUEST.unpack(request)
                with self.standing.at(version):
                    block = self._own_bytes_of(number)
                asks.begin_send(block, asker, _TAG).wait()
            except (RuntimeError, LinkError):  # the run is over, or the asker has died
                return

    def close(self) -> None:
        """Stop handing out parts."""
        try:
            self._words.queue_push(f"asks/{self._groups.seat}", _STOP)
        except RuntimeError:
            return
        self._thread.join(1.0)

    # -- the whole ------------------------------------------------------------------------------

    def tensors(self, version: int) -> dict[str, Tensor]:
        """Return the parameters and buffers at a version, by their names."""
        places = (*self.layout.parameters.places, *self.layout.buffers.places)
        return {place.name: self.fetch(place, version) for place in places}

    def states(self, version: int) -> dict[str, dict[str, StateValue]]:
        """Return the optimizer's state of each parameter at a version, by the names."""
        states: dict[str, dict[str, StateValue]] = {}
        for entry in self.layout.entries:
            value = self.fetch(entry.place, version)
            state = states.setdefault(self._names[entry.parameter], {})
            state[entry.key] = _number(value) if entry.is_number else value
        return states


def _put(
    place: TensorPlace, start: int | None, block: Tensor, target: TensorPlace, out: Tensor
) -> None:
    """Copy a place of ``block`` to the target in ``out``, of which it may be a piece.

    Args:
        start: of the piece, see `SpreadState`; None: it is no piece.
    """
    if start is None:
        target.view(out).copy_(place.view(block))
    elif (dim := _divided_dim(place, target)) is None:
        target.flat(out, start, start + place.numel).copy_(place.flat(block))
    else:
        target.view(out).narrow(dim, start, place.shape[dim]).copy_(place.view(block))


def _number(value: Tensor) -> int | float:
    number = float(value)
    return int(number) if number.is_integer() else number


def _plain(layout: Layout) -> dict[str, Any]:
    """Return a layout as plain data; state is named by its parameter and its key."""
    names = [place.name for place in layout.parameters.places]

    def row(name: str, place: TensorPlace) -> list[Any]:
        dtype = str(place.dtype).removeprefix("torch.")
        return [name, list(place.shape), list(place.strides), dtype, place.offset]

    def name_of(entry: StateEntry) -> str:
        return f"{names[entry.parameter]}/{entry.key}"

    tensors = [
        row(place.name, place) for place in (*layout.parameters.places, *layout.buffers.places)
    ]
    return {
        "places": tensors + [row(name_of(entry), entry.place) for entry in layout.entries],
        "entries": [[names[e.parameter], e.key, e.is_number] for e in layout.entries],
    }


def _piece_starts(part: Mapping[str, Any]) -> dict[str, int]:
    """Return where pieces begin: of parameters, and of state that is kept element by element."""
    starts = dict(part["starts"])
    shapes = {row[0]: row[1] for row in part["places"]}
    for name, key, is_number in part["entries"]:
        is_piece = name in part["starts"] and key != EXISTS and not is_number
        if is_piece and shapes[f"{name}/{key}"] == shapes[name]:
            starts[f"{name}/{key}"] = part["starts"][name]
    return starts


def _divided_dim(piece: TensorPlace, whole: TensorPlace) -> int | None:
    """Return the dimension in which a piece is smaller than its whole; None: it is flat."""
    if len(piece.shape) != len(whole.shape):
        return None
    pairs = enumerate(zip(piece.shape, whole.shape, strict=True))
    return next((dim for dim, (a, b) in pairs if a != b), None)


def _as_whole(place: TensorPlace, whole: Tensor) -> TensorPlace:
    """Return the place of the whole that a piece belongs to."""
    return replace(place, shape=tuple(whole.shape), strides=whole.stride())


def _place(row: Sequence[Any]) -> TensorPlace:
    name, shape, strides, dtype, offset = row
    return TensorPlace(
        name=name, shape=tuple(shape), strides=tuple(strides), dtype=getattr(torch, dtype),
        offset=offset,
    )  # fmt: skip
