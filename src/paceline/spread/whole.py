"""A spread model as one again: its parameters, buffers and optimizer state by their names.

    worker 1  asks "conv1.weight, version 7"  ->  queue of worker 0  ->  thread: is it at 7?
                                                  -> what worker 0 has of it

Only the worker that wants the whole does anything: the others hand out their parts while they wait
or compute, from memory that nobody changes meanwhile (`PartVersion`). No worker can be further than
the one that asks, since every update needs all of them. One tensor is asked for after the other:
files and checkpoints are written so, since no worker may have room for all. This module must not
know who wants it.
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
"""Who asks, for which version, and for which of the places there."""
_STOP = b"-"
_TAG = 11

StateValue: TypeAlias = Tensor | int | float
ReadBlock = Callable[[], tuple[Tensor, Tensor | None]]


class PartVersion:
    """Which version this worker's part is at, and whether it may be read now."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._version: int | None = None

    def stands(self, version: int) -> None:
        """From now on it is this one, and stays as it is."""
        with self._changed:
            self._version = version
            self._changed.notify_all()

    def changes(self) -> None:
        """An update begins, once nobody reads."""
        with self._changed:
            self._version = None

    @contextmanager
    def at(self, version: int) -> Iterator[None]:
        """A block in which the part is at this version."""
        with self._changed:
            self._changed.wait_for(lambda: self._version is not None and self._version >= version)
            yield


class SpreadState:
    """What all workers of a copy hold, as one.

    Args:
        layout: of this worker's part.
        whole: parameters and buffers of the model, in its order, without memory.
        grouped: names of parameters, as the optimizers' groups had them.
        starts: of parameters of which this worker holds a piece, where in the whole it begins: in
            elements, or, where it has the whole's dimensions, in the one in which it is smaller.
        read: this worker's block at the version that stands, and its buffers where they lie apart.

    Attributes:
        layout: of all, as one worker alone would have it.
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
        told = tell_all(groups.copy, {**_plain(layout), "starts": dict(starts)})
        self._parts = [[_place(row) for row in rows["places"]] for rows in told]
        self._starts: list[dict[str, int]] = [_piece_starts(rows) for rows in told]
        """Of each worker's places that are pieces, also of state."""
        self._number_of = [
            {one.name: number for number, one in enumerate(places)} for places in self._parts
        ]
        self._names = [name for name, _ in whole[0]]
        self.layout = self._lay_out(told, whole, grouped)
        self._name_of = {
            one.place: f"{self._names[one.parameter]}/{one.key}" for one in self.layout.entries
        }
        """What workers call places of state."""
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._words = groups.ranks.words()
        self._thread.start()

    def _lay_out(
        self,
        told: Sequence[Mapping[str, Any]],
        whole: tuple[Sequence[tuple[str, Tensor]], Sequence[tuple[str, Tensor]]],
        grouped: Sequence[str],
    ) -> Layout:
        """The layout of the whole, with state as the first who has it keeps it."""
        wholes = dict(whole[0])
        number_of = {name: number for number, name in enumerate(self._names)}
        states: dict[str, dict[str, tuple[TensorPlace, bool]]] = {}
        for rows, places in zip(told, self._parts, strict=True):
            by_name = {one.name: one for one in places}
            for name, key, is_number in rows["entries"]:
                held = states.setdefault(name, {})
                place = by_name[f"{name}/{key}"]
                if f"{name}/{key}" in _piece_starts(rows):
                    place = _as_whole(place, wholes[name])
                held.setdefault(key, (place, is_number))
        rows_of_state = [
            (number_of[name], key, place.without_memory(), is_number)
            for name in grouped
            for key, (place, is_number) in states.get(name, {}).items()
        ]
        return lay_out(whole[0], whole[1], rows_of_state)

    # -- who asks -------------------------------------------------------------------------------

    def fetch(self, place: TensorPlace, version: int) -> Tensor:
        """What lies at a place of the whole layout, at this version; no more than that."""
        copy, name = self._groups.copy, self._name_of.get(place, place.name)
        target = replace(place, offset=0)
        out = torch.zeros(target.num_bytes, dtype=torch.uint8)
        if not target.numel:
            return target.view(out)
        holders = [one for one in range(copy.size) if name in self._number_of[one]]
        if name not in self._starts[holders[0]]:  # each has all of it
            holders = [copy.rank] if copy.rank in holders else holders[:1]
        for holder in holders:
            number = self._number_of[holder][name]
            piece = replace(self._parts[holder][number], offset=0)
            start = self._starts[holder].get(name)
            _put(piece, start, self._one(holder, number, version), target, out)
        return target.view(out)

    def _one(self, holder: int, number: int, version: int) -> Tensor:
        """The bytes of one of its places."""
        if holder == self._groups.copy.rank:
            return self._own_one(number)
        self._ask(holder, version, number)
        found = torch.empty(self._parts[holder][number].num_bytes, dtype=torch.uint8)
        self._groups.asks.begin_receive(found, holder, _TAG).wait()
        return found

    def _own_one(self, number: int) -> Tensor:
        """A copy of one of this worker's places."""
        one, buffers = self._parts[self._groups.copy.rank][number], self._own.buffers
        block, apart = self._read()
        if apart is not None and buffers.start <= one.offset < buffers.stop:
            one, block = replace(one, offset=one.offset - buffers.start), apart
        return one.flat(block).view(torch.uint8).to("cpu", copy=True)

    def _ask(self, number: int, version: int, place: int) -> None:
        seat = self._groups.members[number]
        request = _REQUEST.pack(self._groups.copy.rank, version, place)
        self._words.queue_push(f"asks/{seat}", request)

    # -- who is asked ---------------------------------------------------------------------------

    def _serve(self) -> None:
        words, asks = self._groups.ranks.words(), self._groups.asks
        while True:
            try:
                request = words.queue_pop(f"asks/{self._groups.seat}")
                if request == _STOP:
                    return
                asker, version, number = _REQUEST.unpack(request)
                with self.standing.at(version):
                    block = self._own_one(number)
                asks.begin_send(block, asker, _TAG).wait()
            except (RuntimeError, LinkError):  # the run is over, or the asker has died
                return

    def close(self) -> None:
        """Hand out nothing more."""
        try:
            self._words.queue_push(f"asks/{self._groups.seat}", _STOP)
        except RuntimeError:
            return
        self._thread.join(1.0)

    # -- what it says ---------------------------------------------------------------------------

    def tensors(self, version: int) -> dict[str, Tensor]:
        """Parameters and buffers at this version, by their names."""
        places = (*self.layout.parameters.places, *self.layout.buffers.places)
        return {one.name: self.fetch(one, version) for one in places}

    def states(self, version: int) -> dict[str, dict[str, StateValue]]:
        """The optimizer's state of each parameter at this version."""
        found: dict[str, dict[str, StateValue]] = {}
        for entry in self.layout.entries:
            value = self.fetch(entry.place, version)
            row = found.setdefault(self._names[entry.parameter], {})
            row[entry.key] = _number(value) if entry.is_number else value
        return found


def _put(
    one: TensorPlace, start: int | None, block: Tensor, target: TensorPlace, out: Tensor
) -> None:
    """What lies at a place of ``block`` goes to the target in ``out``, of which it may be a piece.

    Args:
        start: of the piece, see `SpreadState`; None: it is no piece.
    """
    if start is None:
        target.view(out).copy_(one.view(block))
    elif (dim := _divided_dim(one, target)) is None:
        target.flat(out, start, start + one.numel).copy_(one.flat(block))
    else:
        target.view(out).narrow(dim, start, one.shape[dim]).copy_(one.view(block))


def _number(value: Tensor) -> int | float:
    found = float(value)
    return int(found) if found.is_integer() else found


def _plain(layout: Layout) -> dict[str, Any]:
    """A layout as plain data; state is called by its parameter's name and its key."""
    names = [one.name for one in layout.parameters.places]

    def said(name: str, one: TensorPlace) -> list[Any]:
        kind = str(one.dtype).removeprefix("torch.")
        return [name, list(one.shape), list(one.strides), kind, one.offset]

    def of(entry: StateEntry) -> str:
        return f"{names[entry.parameter]}/{entry.key}"

    own = [said(one.name, one) for one in (*layout.parameters.places, *layout.buffers.places)]
    return {
        "places": own + [said(of(one), one.place) for one in layout.entries],
        "entries": [[names[one.parameter], one.key, one.is_number] for one in layout.entries],
    }


def _piece_starts(rows: Mapping[str, Any]) -> dict[str, int]:
    """Where pieces of parameters begin, and of what an optimizer keeps element by element."""
    starts = dict(rows["starts"])
    shapes = {row[0]: row[1] for row in rows["places"]}
    for name, key, is_number in rows["entries"]:
        is_piece = name in rows["starts"] and key != EXISTS and not is_number
        if is_piece and shapes[f"{name}/{key}"] == shapes[name]:
            starts[f"{name}/{key}"] = rows["starts"][name]
    return starts


def _divided_dim(piece: TensorPlace, whole: TensorPlace) -> int | None:
    """The dimension in which a piece is smaller than its whole; None: it is a row of elements."""
    if len(piece.shape) != len(whole.shape):
        return None
    pairs = enumerate(zip(piece.shape, whole.shape, strict=True))
    return next((dim for dim, (a, b) in pairs if a != b), None)


def _as_whole(place: TensorPlace, whole: Tensor) -> TensorPlace:
    """What a piece is a piece of."""
    return replace(place, shape=tuple(whole.shape), strides=whole.stride())


def _place(row: Sequence[Any]) -> TensorPlace:
    name, shape, strides, kind, offset = row
    return TensorPlace(
        name=name, shape=tuple(shape), strides=tuple(strides), dtype=getattr(torch, kind),
        offset=offset,
    )  # fmt: skip
