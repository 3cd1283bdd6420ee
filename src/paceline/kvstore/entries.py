"""All keys of one store, as one process sees them: found, added, pushed to by the store's rule.

It joins the list of keys, the shards and the rule, and gives the rule's state its place. Every
process applies the rule itself, so all must name the same one. This module must not know what a
user may pass: values come checked, as dense tensors of the right shape on the CPU.
"""

import math
import threading
from dataclasses import dataclass

from torch import Tensor

from ..errors import ConfigError, unknown
from ..store.layout import StateEntry
from ..store.memory import LINE_BYTES
from ..store.region import Region
from .entry import NUM_BLOCKS, Cell, block_bytes, control_bytes, plan_slices, prepare_cell
from .index import Directory, Record, StateArea
from .shards import Shards
from .updaters import Change, Rule, RuleState

SPLIT_BYTES = 2**20
"""From this size on a value is split over all shards: below it, one lock is cheaper than many."""


@dataclass(frozen=True, slots=True)
class Stripe:
    """What a rule keeps for one slice (or a whole value): the same bytes in each block."""

    entries: tuple[StateEntry, ...]
    blocks: tuple[Tensor, ...]

    def between(self, old: int, new: int) -> RuleState:
        return RuleState(self.entries, self.blocks[old], self.blocks[new])


class Cells:
    """The keys of ``region``.

    Args:
        rule: what this process applies; None while it has not said so.
    """

    def __init__(self, region: Region, rule: Rule | None, patience_s: float) -> None:
        self.region = region
        self.rule = rule
        self.directory = Directory(region, patience_s)
        self._patience_s = patience_s
        self._shards = Shards(region, self.directory.num_shards, patience_s)
        self._cells: dict[str, Cell] = {}
        self._stripes: dict[tuple[str, str], list[Stripe]] = {}
        self._calling: set[int] = set()

    # -- keys -----------------------------------------------------------------------------------

    def find(self, key: str) -> Cell:
        """The key's cell.

        Raises:
            ConfigError: nobody has added the key; an updater called.
        """
        if self._calling and threading.get_ident() in self._calling:
            raise ConfigError(
                "an updater may change `stored`, but must not use the store that calls it"
            )
        cell = self._cells.get(key)
        if cell is None:
            self.directory.refresh()
            record = self.directory.records.get(key)
            if record is None:
                raise unknown("key", key, self.directory.records, "store.init(key, value) adds one")
            cell = Cell(self.region, self._shards, record, self._patience_s)
            self._cells[key] = cell
        return cell

    def add(self, values: dict[str, Tensor]) -> None:
        """Add keys with their first values, as version 0."""
        with _held(self.directory):
            for key in values:
                if key in self.directory.records:
                    raise _there_already(self.directory.records[key])
            rule = self._agreed_rule()
            for value in values.values():
                rule.check(value)
            for key, value in values.items():
                record = self._place(key, value, rule)
                cell = Cell(self.region, self._shards, record, self._patience_s)
                cell.blocks[0].copy_(value)
                self.directory.add(record, self._place_state(record, rule))
                self._cells[key] = cell

    def set_rule(self, rule: Rule) -> None:
        """Apply ``rule`` from now on; the first process to say so decides for all."""
        with _held(self.directory):
            if self.directory.rule != rule.name:
                records = list(self.directory.records.values())
                for record in records:
                    rule.check(self.find(record.key).blocks[0])
                placed = [self._place_state(record, rule) for record in records]
                self.directory.set_rule(rule.name, [area for area in placed if area])
        self.rule = rule

    # -- push -----------------------------------------------------------------------------------

    def push(self, cell: Cell, pushed: Tensor) -> int:
        """Apply the rule to one key; the version that it makes."""
        rule, record = self._agreed_rule(), cell.record
        stripes = self._stripes_of(cell, rule)
        slices, flat = record.slices, pushed.view(-1)

        def write_slice(number: int | None, old: int, new: int) -> None:
            i = number or 0
            start = slices[i].start
            state = stripes[i].between(old, new) if stripes else None
            part = flat[start : slices[i].stop]
            rule.write(
                Change(record.key, start, part, cell.parts[old][i], cell.parts[new][i], state)
            )

        def write_whole(number: int | None, old: int, new: int) -> None:
            state = stripes[0].between(old, new) if stripes else None
            rule.write(Change(record.key, 0, pushed, cell.blocks[old], cell.blocks[new], state))

        if not rule.is_whole:
            return cell.change(write_slice)
        self._calling.add(threading.get_ident())
        try:
            return cell.change_whole(write_whole)
        finally:
            self._calling.discard(threading.get_ident())

    def _agreed_rule(self) -> Rule:
        self.directory.refresh()
        agreed = self.directory.rule
        if self.rule is None or self.rule.name != agreed:
            mine = "none" if self.rule is None else self.rule.name
            raise ConfigError(
                f"the store's updater is {agreed!r}, this process has {mine!r}: call "
                "set_optimizer or set_updater with the same arguments in every process"
            )
        return self.rule

    # -- room -----------------------------------------------------------------------------------

    def _place(self, key: str, value: Tensor, rule: Rule) -> Record:
        """Take memory for a key; it exists for others only once it is listed."""
        directory = self.directory
        slices = plan_slices(
            value.numel(), value.dtype.itemsize, directory.loads_bytes(),
            split_bytes=SPLIT_BYTES if not rule.is_whole else value.nbytes + 1,
        )  # fmt: skip
        draft = Record(
            key=key, dtype=value.dtype, shape=tuple(value.shape), slices=slices, control=0, values=0
        )
        what = f"key {key!r}, {NUM_BLOCKS} blocks of {value.nbytes:,} bytes,"
        record = Record(
            key=key,
            dtype=draft.dtype,
            shape=draft.shape,
            slices=slices,
            values=directory.take(NUM_BLOCKS * block_bytes(draft), what),
            control=directory.take(control_bytes(slices), what),
        )
        prepare_cell(self.region, record)
        return record

    def _place_state(self, record: Record, rule: Rule) -> StateArea | None:
        """Take memory for what the rule keeps; None if that is nothing, or has its place."""
        num_bytes = NUM_BLOCKS * sum(_size(one) for one in self._entries(record, rule))
        if not num_bytes or (record.key, rule.name) in self.directory.states:
            return None
        offset = self.directory.take(num_bytes, f"the state of {rule.name} for {record.key!r}")
        return StateArea(key=record.key, rule=rule.name, offset=offset)

    def _entries(self, record: Record, rule: Rule) -> list[tuple[StateEntry, ...]]:
        """Per slice, or once for the whole: what the rule keeps."""
        like = self.region.data[:0].view(record.dtype)
        if rule.is_whole:
            return [rule.entries(like.new_empty(record.shape))]
        return [rule.entries(like.new_empty(part.stop - part.start)) for part in record.slices]

    def _stripes_of(self, cell: Cell, rule: Rule) -> list[Stripe]:
        """The rule's state of each slice; empty for rules that remember nothing."""
        record = cell.record
        area = self.directory.states.get((record.key, rule.name))
        if area is None:
            return []
        stripes = self._stripes.get((record.key, rule.name))
        if stripes is None:
            stripes, start = [], area.offset
            for entries in self._entries(record, rule):
                size = _size(entries)
                offsets = [start + block * size for block in range(NUM_BLOCKS)]
                blocks = tuple(self.region.data[at : at + size] for at in offsets)
                stripes.append(Stripe(entries, blocks))
                start += NUM_BLOCKS * size
            self._stripes[record.key, rule.name] = stripes
        return stripes


class _held:
    """The list of keys, locked and read to its end."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory

    def __enter__(self) -> None:
        self._directory.lock.acquire()
        self._directory.refresh()

    def __exit__(self, *error: object) -> None:
        self._directory.lock.release()


def _size(entries: tuple[StateEntry, ...]) -> int:
    """Bytes of one block of a slice's state, in whole lines."""
    end = max((entry.place.offset + entry.place.num_bytes for entry in entries), default=0)
    return math.ceil(end / LINE_BYTES) * LINE_BYTES


def _there_already(record: Record) -> ConfigError:
    return ConfigError(
        f"key {record.key!r} is there already ({record.dtype}, shape {record.shape}): init each "
        "key once, in one process; push changes its value"
    )
