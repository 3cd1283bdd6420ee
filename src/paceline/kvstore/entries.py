"""All keys of one store, as one process sees them: find, add, and push by the store's rule.

    words        | published version | newest begun | whose state: of block 0, of block 1 |
    block 0      | v8                     published: pulls copy it
    block 1      | v9 . . . . .           a push reads v8 and writes here, holding the shard's lock

Version v is in block v & 1, and one word publishes it. A push that dies or raises has changed
nothing visible, and the next one overwrites what it left. The state of a rule has two blocks, too.
Every process applies the rule itself, so all must use the same one. This module must not know what
a user may pass: values are already checked, as dense tensors on the CPU.
"""

import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError, unknown
from ..store.fences import HAS_ORDER
from ..store.layout import StateEntry
from ..store.memory import LINE_BYTES, WORD_BYTES, Region
from .index import Directory, Lock, Record, refuse_updaters
from .updaters import NAMED, Change, Rule, make_rule

_PUBLISHED, _BEGUN, _STATES = range(3)
_TRIES = 4
"""Attempts that a pull may lose to pushes before it takes the lock."""


class StoredState:
    """The state of one rule for one key, with the same layout in each block.

    Args:
        offset: of block 0, in bytes; 0 if the rule has no state.
    """

    def __init__(self, region: Region, entries: tuple[StateEntry, ...], offset: int) -> None:
        size = _size(entries)
        self.offset = offset
        self.blocks = [region.data[at : at + size] for at in (offset, offset + size)]
        self.entries = entries


class StoredKey:
    """One key and its two blocks.

    Args:
        lock: of its shard.
    """

    def __init__(self, region: Region, record: Record, lock: Lock) -> None:
        self.record = record
        self._lock = lock
        self._words = region.words
        self._at = record.offset // WORD_BYTES
        start, size = record.offset + LINE_BYTES, record.num_bytes
        self.blocks = [
            region.data[at : at + size].view(record.dtype).view(record.shape)
            for at in (start, start + _in_lines(size))
        ]

    @property
    def version(self) -> int:
        return self._words[self._at + _PUBLISHED]

    def read(self, copy: Callable[[Tensor], object]) -> None:
        """Call ``copy`` with one whole version, several times if necessary."""
        for _ in range(_TRIES if HAS_ORDER else 0):
            version = self.version
            copy(self.blocks[version & 1])
            if self._words[self._at + _BEGUN] < version + 2:
                return
        with self._lock:
            copy(self.blocks[self.version & 1])

    def push(self, rule: Rule, pushed: Tensor, state: StoredState) -> int:
        """Write the next version and publish it; returns its number."""
        words, at = self._words, self._at
        with self._lock:
            version = self.version + 1
            old, new = ~version & 1, version & 1
            words[at + _BEGUN] = version
            if words[at + _STATES + old] != state.offset:
                state.blocks[old].zero_()  # another rule made this version: no state
            rule.write(
                Change(
                    self.record.key, pushed, self.blocks[old], self.blocks[new],
                    state.entries, state.blocks[old], state.blocks[new],
                )
            )  # fmt: skip
            words[at + _STATES + new] = state.offset
            words[at + _PUBLISHED] = version
        return version


class Entries:
    """The keys of ``region``.

    Args:
        rule: the rule of this process; None: the store's, if its name is enough to make it.
    """

    def __init__(self, region: Region, rule: Rule | None, patience_s: float) -> None:
        self.region = region
        self.patience_s = patience_s
        self.directory = Directory(region, patience_s)
        agreed = self.directory.rule
        self.rule = make_rule(agreed) if rule is None and agreed in NAMED else rule
        self._keys: dict[str, StoredKey] = {}
        self._states: dict[tuple[str, str], StoredState] = {}

    def find(self, key: str) -> StoredKey:
        """The key, whichever process has added it.

        Raises:
            ConfigError: there is no such key; or an updater called.
        """
        refuse_updaters(self.directory.hold)
        if key not in self._keys:
            self.directory.refresh()
            records = self.directory.records
            if key not in records:
                raise unknown("key", key, records, "store.init(key, value) adds one")
            self._keys[key] = self._open(records[key])
        return self._keys[key]

    def add(self, values: dict[str, Tensor]) -> None:
        """Add keys with their first values, as version 0."""
        with self.directory.lock:
            self.directory.refresh()
            for key in values:
                if record := self.directory.records.get(key):
                    raise ConfigError(
                        f"key {key!r} exists already ({record.dtype}, shape {record.shape}): init "
                        "each key once, in one process; push changes its value"
                    )
            rule = self._agreed_rule()
            for value in values.values():
                rule.check(value)
            for key, value in values.items():
                stored = self._open(self._place(key, value))
                stored.blocks[0].copy_(value)
                state = self._place_state(stored.record, rule)
                dtype = str(value.dtype).removeprefix("torch.")
                self.directory.append([{**asdict(stored.record), "dtype": dtype}, *state])
                self._keys[key] = stored

    def set_rule(self, rule: Rule) -> None:
        """Apply ``rule`` from now on; the first process to set it decides for all."""
        directory = self.directory
        with directory.lock:
            directory.refresh()
            if directory.rule != rule.name:
                records = list(directory.records.values())
                for record in records:
                    rule.check(self._open(record).blocks[0])
                states = [row for record in records for row in self._place_state(record, rule)]
                directory.append([*states, {"rule": rule.name}])
        self.rule = rule

    def push(self, stored: StoredKey, pushed: Tensor) -> int:
        """Apply the rule to one key; returns the new version."""
        rule = self._agreed_rule()
        return stored.push(rule, pushed, self._state_of(stored.record, rule))

    def _agreed_rule(self) -> Rule:
        self.directory.refresh()
        agreed = self.directory.rule
        if self.rule is None or self.rule.name != agreed:
            own = "none" if self.rule is None else self.rule.name
            raise ConfigError(
                f"the store's updater is {agreed!r}, but this process has {own!r}: call "
                "set_optimizer or set_updater with the same arguments in every process"
            )
        return self.rule

    def _open(self, record: Record) -> StoredKey:
        return StoredKey(self.region, record, self.directory.shards[record.shard])

    def _place(self, key: str, value: Tensor) -> Record:
        """Allocate memory for a key on the emptiest shard; not visible until it is listed."""
        loads, num_bytes = self.directory.loads_bytes(), LINE_BYTES + 2 * _in_lines(value.nbytes)
        purpose = f"key {key!r}, 2 blocks of {value.nbytes:,} bytes,"
        return Record(
            key=key,
            dtype=value.dtype,
            shape=tuple(value.shape),
            shard=loads.index(min(loads)),
            offset=self.directory.take(num_bytes, purpose),
        )

    def _place_state(self, record: Record, rule: Rule) -> list[dict[str, Any]]:
        """Allocate memory for the rule's state; no row if there is none, or it is allocated."""
        num_bytes = 2 * _size(_state_entries(record, rule))
        if not num_bytes or (record.key, rule.name) in self.directory.states:
            return []
        offset = self.directory.take(num_bytes, f"the state of {rule.name} for {record.key!r}")
        return [{"key": record.key, "rule": rule.name, "offset": offset}]

    def _state_of(self, record: Record, rule: Rule) -> StoredState:
        """The rule's state of a key; empty if the rule has none."""
        name = (record.key, rule.name)
        if name not in self._states:
            offset = self.directory.states.get(name, 0)
            self._states[name] = StoredState(self.region, _state_entries(record, rule), offset)
        return self._states[name]


def _state_entries(record: Record, rule: Rule) -> tuple[StateEntry, ...]:
    return rule.entries(torch.empty(record.shape, dtype=record.dtype))


def _size(entries: tuple[StateEntry, ...]) -> int:
    """Bytes of one block of a state, in whole lines."""
    ends = (entry.place.offset + entry.place.num_bytes for entry in entries)
    return _in_lines(max(ends, default=0))


def _in_lines(num_bytes: int) -> int:
    return math.ceil(num_bytes / LINE_BYTES) * LINE_BYTES
