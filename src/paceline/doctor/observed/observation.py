"""What was seen of a script's steps, as values that cross from its process to ours.

    Observation     parts of a step, what operations do, waits with their lines, prices
    Wait            a place that waits for numbers, and how often
    Price           one fix: what was measured with and without it

The regime is read off here, and so is the budget: both are pure. This module must not know how
anything was measured, nor torch.
"""

import enum
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

INPUT, COPY, FORWARD, BACKWARD = "input", "copies to the device", "forward", "backward"
OPTIMIZER, WAITS, PRINTS, EXCHANGE = "optimizer", "waits", "prints", "communication"
REST = "rest of the script"
PARTS = (INPUT, COPY, FORWARD, BACKWARD, OPTIMIZER, EXCHANGE, WAITS, PRINTS, REST)
"""In the order of a step; the rest is what stands in no other."""
COMPUTING = (FORWARD, BACKWARD, OPTIMIZER)


class Regime(enum.StrEnum):
    """What a step is bound by."""

    INPUT = "input"
    COMMUNICATION = "communication"
    WAITS = "waits"
    COMPUTE = "compute"
    BANDWIDTH = "bandwidth"
    OVERHEAD = "overhead"


class PriceOutcome(enum.StrEnum):
    """What became of a fix."""

    WORTH = "worth it"
    NOTHING = "inside the noise, or less than 2 %"
    UNKNOWN = "cannot be told from noise here"
    NOT_TRIED = "not tried"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """A place in the user's own code that reads a number from the device, or prints.

    Attributes:
        what: ``item()``, ``print()`` ...
        per_step: how often, of the observed steps.
        seconds: a step, of it.
    """

    file: str
    line: int
    what: str
    per_step: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What one fix is worth: the share of a step that it saves, of pairs A B | B A | ...

    Attributes:
        name: of the fix; `fix`: what to write.
        saved, low, high: share of a step, with its 95 % interval; a slower step is below 0.
        file, line: where it would be written; line 0: nowhere in particular.
        words: arguments that the call of that line would be given, by name.
        changes: whether it changes the mathematics.
        reason: for what was not tried or not kept.
        beside: fixes that both sides had already.
    """

    name: str
    fix: str
    outcome: PriceOutcome
    saved: float = 0.0
    low: float = 0.0
    high: float = 0.0
    pairs: int = 0
    file: str = ""
    line: int = 0
    words: tuple[tuple[str, str], ...] = ()
    changes: bool = False
    reason: str = ""
    beside: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What was seen.

    Attributes:
        step_s: a step that was not observed, median; observed_s: of those that were, the mean.
        parts: seconds of an observed step, by part; they sum to ``observed_s``.
        arithmetic_s, bandwidth_s, overhead_s: how the seconds of the computing parts divide: in
            matrix products and convolutions; in operations that move memory; in beginning
            operations, and in Python between them.
        num_operations: a step; allocated_bytes: a step.
        op_per_s: that matrix products and convolutions reach; most_op_per_s: what products of
            matrices in fp32 reached here when it was measured, and most_from: by what.
        num_steps: that were observed.
        device: a name.
        prices: of fixes, in the order in which they were tried; together: of all that are kept.
        ended: why it ended before all was done; empty: it was stopped when it was.
    """

    step_s: float
    observed_s: float
    parts: Mapping[str, float]
    num_steps: int
    device: str
    arithmetic_s: float = 0.0
    bandwidth_s: float = 0.0
    overhead_s: float = 0.0
    num_operations: float = 0.0
    allocated_bytes: float = 0.0
    op_per_s: float = 0.0
    most_op_per_s: float = 0.0
    most_from: str = ""
    waits: tuple[Wait, ...] = ()
    prices: tuple[Price, ...] = ()
    together: Price | None = None
    input_saved: float | None = None
    ended: str = ""

    @property
    def regime(self) -> Regime:
        """What the step is bound by: the largest of what it can be bound by."""
        own = {
            Regime.INPUT: self.parts.get(INPUT, 0.0) + self.parts.get(COPY, 0.0),
            Regime.COMMUNICATION: self.parts.get(EXCHANGE, 0.0),
            Regime.WAITS: self.parts.get(WAITS, 0.0) + self.parts.get(PRINTS, 0.0),
            Regime.COMPUTE: self.arithmetic_s,
            Regime.BANDWIDTH: self.bandwidth_s,
            Regime.OVERHEAD: self.overhead_s + self.parts.get(REST, 0.0),
        }
        return max(own, key=lambda one: own[one])

    @property
    def slow_down(self) -> float:
        """Of the observed steps."""
        return self.observed_s / self.step_s if self.step_s else 1.0

    def share(self, *parts: str) -> float:
        """Of a step, from 0 to 1."""
        seconds = sum(self.parts.get(one, 0.0) for one in parts)
        return seconds / self.observed_s if self.observed_s else 0.0

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "regime": self.regime.value, "slow_down": self.slow_down}

    @classmethod
    def read(cls, found: Mapping[str, Any]) -> "Observation":
        """From the JSON of `to_json`."""
        own = {name: value for name, value in found.items() if name in cls.__slots__}
        own["waits"] = tuple(Wait(**one) for one in own["waits"])
        own["prices"] = tuple(_price(one) for one in own["prices"])
        own["together"] = None if own["together"] is None else _price(own["together"])
        return cls(**own)


def _price(found: Mapping[str, Any]) -> Price:
    return Price(
        **{
            **found,
            "outcome": PriceOutcome(found["outcome"]),
            "beside": tuple(found["beside"]),
            "words": tuple((name, value) for name, value in found["words"]),
        }
    )
