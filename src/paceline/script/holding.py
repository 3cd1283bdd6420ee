"""What a script does with its mini-batches: one batch, one step block, one lease.

    lease --to the loop--> in hand --backward--> with a gradient --optimizer.step--> pushed
                              |                       |
                              | the next is asked for | the block ends without a step
                              v                       v
                           unused                accumulated: part of the next push

A holding has the leases of one ticket that came to the loop, in order, and what was done with
each. It decides what a push carries, what stays for a later one, and when local steps are done.
``zero_grad`` drops what was accumulated, as in plain PyTorch. This module must not know
exchanges, tensors or loaders.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from ..core.batches import Batches
from ..errors import ConfigError
from ..events import Grant, Lease
from ..exchange.base import Work


@dataclass(slots=True)
class Held:
    """One mini-batch that the loop has taken.

    Attributes:
        num_samples: positions of the lease, or samples that a stream gave.
        has_gradient: whether its gradient is in ``.grad``, or in a push.
        num_steps: calls of ``optimizer.step`` since the loop took it.
        weight: its weight in an update; None: its samples.
        is_used: whether a step has used that gradient, here or as a push.
        is_closed: whether its block has ended, or the loop asked for the next.
        is_called_off: whether it is now another worker's, or was given back.
    """

    lease: Lease
    num_samples: int
    has_gradient: bool = False
    num_steps: int = 0
    weight: float | None = None
    is_used: bool = False
    is_closed: bool = False
    is_called_off: bool = False

    @property
    def share(self) -> float:
        """Its weight in an update."""
        return self.num_samples if self.weight is None else self.weight


class Holding:
    """The mini-batches of the work in flight.

    Args:
        is_local: whether the user's optimizer steps here, and a push is a difference of parameters:
            it is due when every lease of the grant has made its step or was left unused.

    Attributes:
        current: the loop's newest mini-batch; None: none of this work.
        has_worked: whether a step block was begun, or a backward pass, since the epoch opened.
        has_stepped: whether a step block was begun since then, or a step of the optimizer.
        has_dropped: whether a gradient that no step had used was zeroed since then.
        steps_a_batch: the most steps on one batch that the script has made so far.
    """

    def __init__(self, *, is_local: bool) -> None:
        self._is_local = is_local
        self._grant: Grant | None = None
        self._coming: deque[Lease] = deque()
        self._held: list[Held] = []  # of this ticket, or part of the next push
        self._num_granted = 0  # leases that came with this grant
        self._last = Work()
        self.current: Held | None = None
        self.steps_a_batch = 1
        self.open()

    def open(self) -> None:
        """Start an epoch."""
        self.has_worked = self.has_stepped = self.has_dropped = False

    # -- grants and batches -----------------------------------------------------------------------

    def follow(self, grant: Grant | None) -> bool:
        """Take over the exchange's current grant; its leases that are not held yet come next.

        Returns:
            False where what was held has gone to others, since the push that kept it came late.
        """
        if grant is self._grant:
            return True
        self._grant = grant
        leases = () if grant is None else grant.leases
        known = {held.lease.id for held in self._held}
        is_lost = grant is not None and not known.issubset(lease.id for lease in leases)
        if is_lost:
            self.forget()
            self._grant, known = grant, set()
        self._coming = deque(lease for lease in leases if lease.id not in known)
        self._num_granted = len(self._coming)
        return not is_lost

    def add(self, lease: Lease) -> None:
        """Add a lease to this ticket."""
        self._coming.append(lease)

    def take(self) -> Lease | None:
        """The next mini-batch for the loop; None: it has all of this grant."""
        if not self._coming:
            return None
        lease = self._coming.popleft()
        self.current = Held(lease, lease.num_samples)
        self._held.append(self.current)
        return self.current.lease

    def forget(self) -> None:
        """Drop all work: it was called off or given back."""
        for one in self._held:
            one.is_called_off = True
        self._held.clear()
        self._grant = None

    # -- what the script does ---------------------------------------------------------------------

    def differentiated(self) -> None:
        """Note that gradients of the current batch, and others of its block, are in ``.grad``."""
        self.has_worked = True
        if self.current is not None:
            self.current.has_gradient = True
        for one in self._held:
            one.has_gradient = one.has_gradient or not one.is_closed

    def zeroed(self) -> None:
        """Note ``zero_grad``: gradients that no step has used are gone."""
        for one in self._held:
            self.has_dropped |= one.has_gradient and not one.is_used
            one.has_gradient = one.is_used

    @property
    def has_accumulated(self) -> bool:
        """Whether a gradient waits for a step."""
        return any(one.has_gradient and not one.is_used for one in self._held)

    @property
    def only_looked(self) -> bool:
        """Whether nothing of this epoch was stepped on, nor waits for a step."""
        return not self.has_stepped and (self.has_dropped or not self.has_worked)

    def stepped(self) -> int:
        """Note a call of ``optimizer.step``; the number of calls on the current batch."""
        assert self.current is not None
        self.differentiated()
        self.current.num_steps += 1
        for one in self._held:
            one.is_used = one.is_used or one.has_gradient
        return self.current.num_steps

    def close(self) -> bool:
        """End the current block; whether local steps are due to be pushed."""
        if self.current is not None:
            self.current.is_closed = True
            self.steps_a_batch = max(self.steps_a_batch, self.current.num_steps)
        for one in self._held:
            one.is_closed = True
        if not self._is_local or not self._held or self._coming:
            return False
        num_done = sum(bool(one.num_steps) or not one.has_gradient for one in self._held)
        return all(one.is_closed for one in self._held) and num_done >= self._num_granted

    @property
    def is_finished(self) -> bool:
        """Whether a push has carried the current batch, and its lease did not stay."""
        return self.current is not None and self.current.is_used and not self._held

    @property
    def is_owed(self) -> bool:
        """Whether a batch's lease stayed for a step to come, which did not."""
        return not self._is_local and any(one.is_used for one in self._held)

    # -- pushes -----------------------------------------------------------------------------------

    def work(self, *, keeps: bool = False) -> Work:
        """The work of a push of all batches that were stepped on; the rest joins the next.

        Args:
            keeps: whether the script steps once more on it, so all leases stay.
        """
        used = [one for one in self._held if one.is_used]
        work = Work(
            num_samples=sum(one.num_samples for one in used),
            weight=float(sum(one.share for one in used)),
        )
        if keeps:
            work.kept = tuple(one.lease.id for one in self._held)
            return work
        rest = [one for one in self._held if not one.is_used]
        work.kept = tuple(one.lease.id for one in rest if one.has_gradient)
        unused = [one.lease.id for one in rest if not one.has_gradient]
        if not work.weight:  # none of it counts
            work.num_samples = 0
            unused += [one.lease.id for one in used]
        work.unused = (*unused, *(one.id for one in self._coming))
        return work

    def again(self) -> Work:
        """The work of the last push again, where a batch is stepped on more often than expected.

        Its own leases are done; those of the ticket, which came for the next batch, stay.
        """
        ids = tuple(one.id for one in self._coming)
        return Work(num_samples=self._last.num_samples, weight=self._last.weight, kept=ids)

    def pushed(self, work: Work) -> None:
        """Note that a push carried ``work``; what it kept stays held."""
        if work.weight:
            self._last = work
        self._held = [one for one in self._held if one.lease.id in work.kept]


class KeptPart:
    """Holds a worker to one part of every batch, in order, so that it can carry a state."""

    def __init__(self) -> None:
        self._part: int | None = None
        self._epoch, self._last, self._batches = -1, -1, Batches(1, 1, 1)

    def begin_pass(self, epoch: int, batches: Batches) -> None:
        self._epoch, self._last, self._batches = epoch, -1, batches

    def took(self, held: Held) -> None:
        """Check the loop's new mini-batch.

        Raises:
            ConfigError: it is another part than before, or not of the next batch.
        """
        lease, before = held.lease, self._last
        part, batch = self._batches.part_at(lease.start), self._batches.batch_at(lease.start)
        if self._part not in (None, part) or (before >= 0 and batch != before + 1):
            raise ConfigError(
                f"prepare(sticky=True): this worker had part {self._part} of batch {before}, and "
                f"now got part {part} of batch {batch}, to which its state does not belong; "
                "workers must all stay, and take each mini-batch once"
            )
        self._part, self._last = part, batch

    def reserve(self, leases: Sequence[Lease]) -> None:
        return

    def end_pass(self) -> None:
        return
