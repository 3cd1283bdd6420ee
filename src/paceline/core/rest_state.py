"""A run without its members: the state that a checkpoint holds, and from which others can go on.

    state of the coordinator --1--> at rest --2--> recut --> a coordinator with other members

    1  work in flight and pushes that are in no update return; members are gone, and the protocol
       keeps what it has learned, not who they were
    2  another number of workers cuts batches into another number of mini-batches: batches that
       have not begun are cut again, so an update still averages one batch

States are what ``state()`` returns, as JSON. This module must not know files or time.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from ..events import Lease
from ..fields import boolean, count, integer, many
from ..protocols.base import SyncProtocol
from .batches import Batches
from .cuts import Cuts

State = dict[str, Any]
_NOT_YET, _DROPPED, _UNUSED = 0, -1, -2  # fates of leases that no update has used


def at_rest(protocol: SyncProtocol, unheard: State) -> State:
    """The protocol's state without members: the initial one, with what it has learned."""
    current = protocol.state()
    return {**unheard, **{name: current[name] for name in protocol.learned}}


def resting(state: State, protocol: State) -> State:
    """The state that ``Coordinator.stop`` would leave; ``protocol`` is at rest.

    Invariant: it *is* that state (tests/core/test_resting.py, for every protocol).
    """
    ledger, members, stats = state["ledger"], state["members"], dict(state["stats"])
    stats["cancelled"] += sum(ticket is not None for *_, ticket in members["live"])
    stats["discarded"] += len(ledger["pushed"])
    gone = {number: serial for number, serial, *_ in members["live"]}
    return {
        **state,
        "stats": stats,
        "weightless": [],
        "outside": [],
        "protocol": protocol,
        "ledger": _ledger_at_rest(ledger),
        "members": {
            "live": [],
            "departed": sorted(map(list, {**dict(members["departed"]), **gone}.items())),
            "pending": [],
        },
    }


def _ledger_at_rest(ledger: State) -> State:
    held = {lease_id for lease_id, _ in ledger["held"]}
    parts = (ledger["pushed"], ledger["again"], ledger["riding"])
    pushed = {lease_id for part in parts for _, rows in part for lease_id, *_ in rows}
    kept = {lease_id for _, ids in ledger["lookahead"]["kept"] for lease_id in ids}
    free = held | pushed | kept | set(ledger["returned"])
    first_id = ledger["cuts"]["first_id"]  # lower ids are of earlier epochs
    returned = sorted(lease_id for lease_id in free if lease_id >= first_id)
    fate, end = list(ledger["fate"]), ledger["cuts"]["end"]
    if end is not None:  # nothing after the end of a stream is returned
        starts = [0, *ledger["cuts"]["stops"]]
        num_before = bisect_left(returned, end, key=lambda lease_id: starts[lease_id - first_id])
        for lease_id in returned[num_before:]:
            fate[lease_id - first_id] = _UNUSED
        del returned[num_before:]
    return {
        **ledger,
        "fate": fate,
        "returned": returned,
        "held": [],
        "work": [],
        "pushed": [],
        "again": [],
        "riding": [],
        "lookahead": {"depths": [], "kept": [], "told": []},
    }


def audit(state: State, batches: Batches, *, is_sized: bool = True) -> None:
    """Check that a state from a file is consistent: no sample is lost or used twice.

    Args:
        batches: of an epoch, as the run has them now.
        is_sized: whether no epoch has more samples than they have; a stream or numbers may.

    Raises:
        ValueError, TypeError or KeyError: it is not at rest, or not saved by a coordinator.
    """
    version, epoch = count(state["version"]), integer(state["epoch"])
    is_open = boolean(state["is_epoch_open"])
    audit_members(state["members"])
    stats = state["stats"]
    for name in ("updates", "late", "discarded", "cancelled"):
        count(stats[name])
    count(state["num_unused"])
    dict(many(_pair)(stats["staleness_versions"]))
    ledger = state["ledger"]
    ahead = ledger["lookahead"]
    parts = (ledger[name] for name in ("held", "work", "pushed", "again", "riding"))
    for part in (state["weightless"], state["outside"], *parts, *ahead.values()):
        if part != []:
            raise ValueError("work is in flight, in a run at rest")
    _audit_cuts(ledger["cuts"], epoch, batches, is_sized=is_sized)
    _audit_fates(ledger, version, is_open=is_open and epoch >= 0)


def _pair(value: Any) -> tuple[int, int]:
    first, second = many(integer)(value)
    return count(first), second


def audit_members(members: State) -> None:
    """As `audit`, for the members."""
    if members["live"] != [] or members["pending"] != []:
        raise ValueError("members are live, in a run at rest")
    departed = many(_pair)(members["departed"])
    if len(dict(departed)) < len(departed):
        raise ValueError("a member is listed twice among those that left")


def _audit_cuts(cuts: State, epoch: int, batches: Batches, *, is_sized: bool) -> None:
    """Check that every batch that was begun is cut from its start to its end."""
    if (ends := cuts["batch_ends"]) is not None:
        if is_sized and isinstance(ends, int) and ends > batches.end:
            raise ValueError(f"the epoch ends at {ends}, after its last sample, {batches.end}")
        batches = batches.with_ends(count(ends) if isinstance(ends, int) else many(count)(ends))
    if cuts.get("end") is not None:
        count(cuts["end"])
    num_cut, stops = count(cuts["next_batch"]), many(count)(cuts["stops"])
    count(cuts["first_id"])
    if count(cuts["parts"]) < 1 or integer(cuts["epoch"]) != epoch:
        raise ValueError(f"the cuts are of epoch {cuts['epoch']}, but the run is in {epoch}")
    if epoch < 0:
        num_cut = 0
    if num_cut > batches.num_batches or count(cuts["num_taken"]) > len(stops):
        raise ValueError(f"{num_cut} batches are cut, but the epoch has {batches.num_batches}")
    borders = {batches.bounds(batch)[1] for batch in range(num_cut)}
    if any(a >= b for a, b in pairwise((0, *stops))) or not borders <= set(stops):
        raise ValueError("the cuts are not contiguous")
    if stops[-1:] != ((batches.bounds(num_cut - 1)[1],) if num_cut else ()):
        raise ValueError(f"the cuts end at {stops[-1:]}, but the batches do not")


def _audit_fates(ledger: State, version: int, *, is_open: bool) -> None:
    """Check that each lease that was taken is in an update, dropped, or free again."""
    cuts, fates = ledger["cuts"], many(integer)(ledger["fate"])
    free = [cuts["first_id"] + i for i, fate in enumerate(fates) if fate == _NOT_YET]
    if len(fates) != cuts["num_taken"] or sorted(many(count)(ledger["returned"])) != free:
        raise ValueError("a mini-batch is missing, or in two places")
    if any(not _UNUSED <= fate <= version for fate in fates):
        raise ValueError(f"a mini-batch is in an update after the newest, {version}")
    if fates.count(_DROPPED) != count(ledger["num_dropped"]):
        raise ValueError(
            f"{ledger['num_dropped']} mini-batches were dropped, but others are missing"
        )
    if not is_open and (free or cuts["num_taken"] < len(cuts["stops"])):
        raise ValueError("the epoch is over, but a mini-batch is left")


def next_member(state: State) -> int:
    """The lowest member id that this run has not used."""
    return max((number for number, _ in state["members"]["departed"]), default=-1) + 1


def recut(ledger: State, batches: Batches) -> State:
    """The ledger's state for ``batches`` with another number of parts; unchanged if it is equal.

    A batch that is partly used keeps its cuts. Leases get new ids, so that an id never means two
    ranges.
    """
    cuts = ledger["cuts"]
    if cuts["parts"] == batches.parts or cuts["epoch"] < 0:
        return ledger
    if cuts["batch_ends"] is not None:
        batches = batches.with_ends(cuts["batch_ends"])
    old_cuts = Cuts.from_state(cuts, batches)
    fates = [*ledger["fate"], *[_NOT_YET] * (len(old_cuts.leases) - len(ledger["fate"]))]
    by_batch = _by_batch(old_cuts.leases, fates, batches, cuts["next_batch"])
    while by_batch and not any(fate for _, fate in by_batch[-1]):
        by_batch.pop()
    stops, new_fates, first_id = [], list[int](), old_cuts.next_id
    for batch, rows in enumerate(by_batch):
        if not any(fate for _, fate in rows):
            rows = [(lease, _NOT_YET) for lease in batches.cut(batch, cuts["epoch"], 0)]
        stops += [lease.stop for lease, _ in rows]
        new_fates += [fate for _, fate in rows]
    new_cuts = {
        "batch_ends": cuts["batch_ends"],
        "end": cuts.get("end"),
        "parts": batches.parts,
        "epoch": cuts["epoch"],
        "first_id": first_id,
        "next_batch": len(by_batch),
        "num_taken": len(stops),
        "stops": stops,
    }
    returned = [first_id + i for i, fate in enumerate(new_fates) if not fate]
    return {**ledger, "cuts": new_cuts, "fate": new_fates, "returned": returned}


_Rows = list[tuple[Lease, int]]


def _by_batch(
    leases: Sequence[Lease], fates: Sequence[int], batches: Batches, num_batches: int
) -> list[_Rows]:
    """The leases that were cut and their fates, by batch."""
    rows: list[_Rows] = [[] for _ in range(num_batches)]
    batch = 0
    for lease, fate in zip(leases, fates, strict=True):
        while lease.start >= batches.bounds(batch)[1]:
            batch += 1
        rows[batch].append((lease, fate))
    return rows


def frontier(ledger: State, batches: Batches) -> int | None:
    """The position before which all samples are used and after which none is; None: there is none.

    ``ledger`` is at rest. From such a position peers can go on by themselves.
    """
    cuts = Cuts.from_state(ledger["cuts"], batches)
    num_used = 0
    fates = ledger["fate"]
    while num_used < len(fates) and fates[num_used]:
        num_used += 1
    if any(fates[num_used:]):
        return None
    return cuts.leases[num_used - 1].stop if num_used else 0
