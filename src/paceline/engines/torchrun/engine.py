"""The torchrun engine: its members were started by another launcher, one per rank.

A thread of rank 0 runs the controller with it. The launcher starts, ends and restarts processes:
this engine has no `Processes`. A rank that dies is reported by the one before it (group.py), and
ends the run. This module must not know protocols or plans.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from ...errors import ConfigError
from ...store.control import Control
from ...store.memory import SharedMemory
from ...wire.messages import ToMember
from ..base import Engine, Event, MemberSpec, ProcessLeft, StoreView, Traits
from .post import Begin, Bye, CallOff, ControllerPost, EndAsked, Hello, Lost


@dataclass(frozen=True, slots=True, kw_only=True)
class RankZero:
    """What the controller's thread uses of rank 0.

    Attributes:
        memory: returns its arena and control words; called once the store is laid out.
        processes: seat -> the rank's process and machine as text, and its process id.
        lost: ranks that have died; filled by the engine.
        on_signal: called when a rank received a signal that asks for the end.
        on_folder: called when the folder of the run is known.
        is_one_machine: whether all ranks are on this machine.
        why_unmapped: why they cannot map each other's memory; "": they can.
    """

    post: ControllerPost
    memory: Callable[[], tuple[SharedMemory, Control]]
    processes: Mapping[int, tuple[str, int]]
    lost: set[int]
    on_signal: Callable[[int], None]
    on_folder: Callable[[str], None]
    is_one_machine: bool
    why_unmapped: str = "none has tried"


class TorchrunEngine(Engine):
    """Runs the ranks of one launcher as members.

    Args:
        num_seats: the number of ranks.
        zero: what it uses of this process; None if this process was not started as a rank.

    Raises:
        ConfigError: this process is not a rank.
    """

    traits = Traits(
        name="torchrun", cancels=False, loses_members=False, has_store=False, is_spmd=True
    )

    def __init__(self, num_seats: int, zero: RankZero | None = None) -> None:
        if zero is None:
            raise ConfigError(
                "engine torchrun cannot be chosen by a setting: leave the setting out, and start "
                f"the script with torchrun --nproc-per-node {num_seats} SCRIPT"
            )
        self._zero = zero
        self.traits = replace(
            self.traits, is_one_machine=zero.is_one_machine, why_unmapped=zero.why_unmapped
        )
        self._members: dict[int, int] = {}
        """Seat -> member."""
        self._seats: dict[int, int] = {}
        """Member -> seat."""

    def start(self, specs: Sequence[MemberSpec], program: bytes) -> dict[int, tuple[int, int]]:
        """Let the ranks' scripts continue; in a dry run ranks that are not needed wait."""
        zero = self._zero
        self._members = {spec.seat: spec.member for spec in specs}
        self._seats = {spec.member: spec.seat for spec in specs}
        zero.on_folder(str(specs[0].context["run_dir"]))
        for spec in specs:
            zero.post.tell(spec.seat, [Begin(json.dumps(asdict(spec)))])
        return {spec.member: (spec.seat, zero.processes[spec.seat][1]) for spec in specs}

    def events(self, timeout_s: float) -> Sequence[Event]:
        events: list[Event] = []
        for seat, message in self._zero.post.hear(timeout_s):
            if isinstance(message, EndAsked):
                self._zero.on_signal(message.number)
            elif isinstance(message, Lost):
                events += self._left(message.seat)
            elif not isinstance(message, Hello | Bye):
                # A rank that is not needed (in a dry run) sends nothing but a failure.
                member = self._members.get(seat, min(self._members.values()))
                events.append((member, message))
        return events

    def _left(self, seat: int) -> list[Event]:
        if seat in self._zero.lost:
            return []
        self._zero.lost.add(seat)
        if seat not in self._members:
            return []  # a rank that is not needed
        return [(self._members[seat], ProcessLeft(f"{self._zero.processes[seat][0]} is gone"))]

    def send(self, messages: Sequence[tuple[int, ToMember]]) -> None:
        outbox: dict[int, list[ToMember]] = {}
        for member, message in messages:
            outbox.setdefault(self._seats[member], []).append(message)
        for seat, seat_messages in outbox.items():
            if seat not in self._zero.lost:
                self._zero.post.tell(seat, seat_messages)

    def cancel(self, member: int, serial: int) -> None:
        self._zero.post.tell(self._seats[member], [CallOff(serial)])

    def lay_out(self, num_bytes: int) -> StoreView:
        """Use rank 0's own memory: checkpoints are pinned in it; its words signal the others."""
        memory, control = self._zero.memory()
        memory.grow(num_bytes)
        return StoreView(memory, control)

    def close(self) -> None:
        """Do nothing: launch/ranks.py ends the ranks, after the end has been reported."""
