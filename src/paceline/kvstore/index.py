"""Which keys a store holds, and where: a list in shared memory that only grows.

    line 0      what the region is: format, shards, bytes of the list, bytes taken
    lock        of this list
    locks       one a shard
    the list    records, each a length and that many bytes of JSON
    the rest    handed out from the start to the end, never given back

A record is written first and counted in afterwards, so a process that dies while it adds a key
leaves the list as it was. Every process keeps what it has read and reads on from there. This
module must not know how a key's values are changed.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import ConfigError
from ..store.memory import LINE_BYTES, WORD_BYTES
from ..store.region import Region
from .locks import LOCK_BYTES, open_lock, prepare_lock

LIST_BYTES = 16 * 2**20
"""Address space for the list: some hundred thousand keys. Pages are taken when they are used."""

_PAGE_BYTES = 4096
_MAGIC = int.from_bytes(b"PACEKV01", "little")
_FORMAT, _SHARDS, _LISTED, _TAKEN = range(4)
_LOCK = LINE_BYTES
_SHARD_LOCKS = _LOCK + LOCK_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Elements ``[start, stop)`` of a key, in row-major order, which ``shard`` guards."""

    shard: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One key. ``control`` and ``values`` are offsets in bytes."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    slices: tuple[Slice, ...]
    control: int
    values: int

    @property
    def num_bytes(self) -> int:
        return self.slices[-1].stop * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class StateArea:
    """Where the rule ``rule`` keeps what it remembers about ``key``."""

    key: str
    rule: str
    offset: int


class Directory:
    """The list, as one process reads and extends it. Writers hold ``lock``.

    Args:
        region: laid out by ``lay_out_region``.
    """

    def __init__(self, region: Region, patience_s: float) -> None:
        words = region.words
        if region.num_bytes < _SHARD_LOCKS or words[_FORMAT] != _MAGIC:
            raise ConfigError(
                f"descriptor {region.fd} holds no store of this version of Paceline; hand over "
                "store.fd, and use one version in all processes"
            )
        self._region = region
        self.num_shards = words[_SHARDS]
        self._list = list_start(self.num_shards)
        self._num_read = 0
        self.lock = open_lock(region, _LOCK, "the list of keys", patience_s)
        self.records: dict[str, Record] = {}
        self.states: dict[tuple[str, str], StateArea] = {}
        self.rule = ""
        """The newest rule, in words; every process applies the same one."""
        self.refresh()

    def refresh(self) -> None:
        """Read what was added since; safe from several threads at once: all read the same."""
        listed = self._region.words[_LISTED]
        if listed == self._num_read:
            return
        for row in self._rows(self._num_read, listed):
            if "rule" in row and "key" not in row:
                self.rule = row["rule"]
            elif "rule" in row:
                area = StateArea(key=row["key"], rule=row["rule"], offset=row["offset"])
                self.states[area.key, area.rule] = area
            else:
                self.records[row["key"]] = _record(row)
        self._num_read = listed

    def loads_bytes(self) -> list[int]:
        """Per shard: bytes of the values that it guards."""
        loads = [0] * self.num_shards
        for record in list(self.records.values()):
            for part in record.slices:
                loads[part.shard] += (part.stop - part.start) * record.dtype.itemsize
        return loads

    # -- under the lock -------------------------------------------------------------------------

    def take(self, num_bytes: int, what: str) -> int:
        """The offset of ``num_bytes`` zeroed bytes, aligned to a line or, if large, to a page."""
        words = self._region.words
        align = _PAGE_BYTES if num_bytes >= _PAGE_BYTES else LINE_BYTES
        start = -(-words[_TAKEN] // align) * align
        if start + num_bytes > self._region.num_bytes:
            first = self._list + LIST_BYTES
            raise ConfigError(
                f"the store is full: {what} needs {num_bytes:,} bytes, "
                f"{max(0, self._region.num_bytes - start):,} of "
                f"{self._region.num_bytes - first:,} are left; create it with a larger "
                "capacity_bytes (memory is taken only when it is used)"
            )
        words[_TAKEN] = start + num_bytes
        return start

    def add(self, record: Record, state: StateArea | None) -> None:
        """List a key together with its state: others see both or neither."""
        row = {
            "key": record.key,
            "dtype": str(record.dtype).removeprefix("torch."),
            "shape": list(record.shape),
            "slices": [[part.shard, part.start, part.stop] for part in record.slices],
            "control": record.control,
            "values": record.values,
        }
        self._append([row, *([_state_row(state)] if state else [])])

    def set_rule(self, rule: str, states: list[StateArea]) -> None:
        """List what all processes apply from now on, with its state for the keys there are."""
        self._append([*(_state_row(state) for state in states), {"rule": rule}])

    def _append(self, rows: list[dict[str, Any]]) -> None:
        words = self._region.words
        texts = [json.dumps(row, separators=(",", ":")).encode() for row in rows]
        content = b"".join(len(text).to_bytes(WORD_BYTES, "little") + text for text in texts)
        listed = words[_LISTED]
        if listed + len(content) > LIST_BYTES:
            raise ConfigError(
                f"the store's list of keys is full ({len(self.records):,} keys); "
                "join small tensors to fewer keys"
            )
        start = self._list + listed
        self._region.data[start : start + len(content)].copy_(
            torch.frombuffer(bytearray(content), dtype=torch.uint8)
        )
        words[_LISTED] = listed + len(content)
        self.refresh()

    def _rows(self, start: int, stop: int) -> Iterator[dict[str, Any]]:
        content = self._region.data[self._list + start : self._list + stop].numpy().tobytes()
        at = 0
        while at < len(content):
            size = int.from_bytes(content[at : at + WORD_BYTES], "little")
            at += WORD_BYTES + size
            yield json.loads(content[at - size : at])


def region_bytes(num_shards: int, capacity_bytes: int) -> int:
    return list_start(num_shards) + LIST_BYTES + capacity_bytes


def lay_out_region(region: Region, num_shards: int, rule: str) -> None:
    """Make an empty store in zeroed memory."""
    words = region.words
    words[_SHARDS] = num_shards
    words[_TAKEN] = list_start(num_shards) + LIST_BYTES
    prepare_lock(region, _LOCK)
    for shard in range(num_shards):
        prepare_lock(region, shard_lock(shard))
    words[_FORMAT] = _MAGIC
    Directory(region, patience_s=1.0).set_rule(rule, [])


def shard_lock(shard: int) -> int:
    """The offset of a shard's lock."""
    return _SHARD_LOCKS + shard * LOCK_BYTES


def list_start(num_shards: int) -> int:
    return -(-shard_lock(num_shards) // _PAGE_BYTES) * _PAGE_BYTES


def _state_row(area: StateArea) -> dict[str, Any]:
    return {"key": area.key, "rule": area.rule, "offset": area.offset}


def _record(row: dict[str, Any]) -> Record:
    dtype = getattr(torch, row["dtype"])
    assert isinstance(dtype, torch.dtype)
    return Record(
        key=row["key"],
        dtype=dtype,
        shape=tuple(row["shape"]),
        slices=tuple(
            Slice(shard=shard, start=start, stop=stop) for shard, start, stop in row["slices"]
        ),
        control=row["control"],
        values=row["values"],
    )
