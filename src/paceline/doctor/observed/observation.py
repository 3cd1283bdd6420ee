"""What was measured of a script's steps, as values that cross from its process to the doctor's.

    Observation     parts of a step, its operations, waits with their lines, prices
    Wait            a place that waits for numbers, and how often
    Price           one fix: what was measured with and without it

The regime and the budget are derived here from the measurements alone. This module must not know
how anything was measured, nor torch.
"""

import enum
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

INPUT, COPY, FORWARD, BACKWARD = "input", "copies to the device", "forward", "backward"
OPTIMIZER, WAITS, PRINTS, EXCHANGE = "optimizer", "waits", "prints", "communication"
REST = "rest of the script"
PARTS = (INPUT, COPY, FORWARD, BACKWARD, OPTIMIZER, EXCHANGE, WAITS, PRINTS, REST)
"""All parts in the order of a step; the rest is what is in no other part."""
COMPUTING = (FORWARD, BACKWARD, OPTIMIZER)


class Regime(enum.StrEnum):
    """What a step is bound by: the part that must shrink to make it faster."""

    INPUT = "input"
    COMMUNICATION = "communication"
    WAITS = "waits"
    COMPUTE = "compute"
    BANDWIDTH = "bandwidth"
    OVERHEAD = "overhead"


class PriceOutcome(enum.StrEnum):
    """What measuring a fix has shown."""

    WORTH = "worth it"
    NOTHING = "inside the noise, or less than 2 %"
    UNKNOWN = "cannot be told from noise here"
    NOT_TRIED = "not tried"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """A place in the user's own code that reads a number from the device, or prints.

    Attributes:
        file, line: the place.
        what: the call, such as ``item()`` or ``print()``.
        per_step: how often it is made in an observed step, on average.
        seconds: the seconds that it takes in an observed step, on average.
    """

    file: str
    line: int
    what: str
    per_step: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What one fix is worth: the share of a step that it saves, from pairs A B | B A | ...

    Attributes:
        name: the fix's short name.
        fix: what the user should write.
        outcome: what measuring it has shown.
        saved: the share of a step that it saves; below 0 if the step is slower.
        low, high: the 95 % interval of ``saved``.
        pairs: how many pairs were measured.
        file, line: where it would be written; line 0 if at no particular place.
        words: names and values of the keyword arguments for the call at that line.
        changes: whether it changes the mathematics.
        reason: why it was not tried or not kept; empty if there is an interval to show.
        beside: names of the fixes that were in effect on both sides.
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
    """What was measured of a script's steps.

    Attributes:
        step_s: median seconds of a step that was not observed.
        observed_s: mean seconds of an observed step.
        parts: seconds of an observed step, by part; they sum to ``observed_s``.
        num_steps: how many steps were observed.
        device: the name of the device.
        arithmetic_s, bandwidth_s, overhead_s: how the seconds of the computing parts divide: into
            matrix products and convolutions; operations that move memory; launching operations,
            and Python between them.
        num_operations: operations per step.
        allocated_bytes: bytes allocated per step.
        op_per_s: rate that matrix products and convolutions reach; 0 if unknown.
        most_op_per_s: rate that matrix products in fp32 reached when this machine was probed.
        most_from: the source of ``most_op_per_s``.
        waits: the places that wait for numbers or print.
        prices: prices of the fixes, in the order in which they were tried.
        together: the price of all fixes that are kept, together.
        input_saved: share of a step that batches at no cost would save; None if not measured.
        ended: why the script ended before all was measured; empty if it did not.
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
        """The regime that takes most of an observed step."""
        seconds = {
            Regime.INPUT: self.parts.get(INPUT, 0.0) + self.parts.get(COPY, 0.0),
            Regime.COMMUNICATION: self.parts.get(EXCHANGE, 0.0),
            Regime.WAITS: self.parts.get(WAITS, 0.0) + self.parts.get(PRINTS, 0.0),
            Regime.COMPUTE: self.arithmetic_s,
            Regime.BANDWIDTH: self.bandwidth_s,
            Regime.OVERHEAD: self.overhead_s + self.parts.get(REST, 0.0),
        }
        return max(seconds, key=lambda regime: seconds[regime])

    @property
    def slow_down(self) -> float:
        """How many times as long an observed step takes as a plain one."""
        return self.observed_s / self.step_s if self.step_s else 1.0

    def share(self, *parts: str) -> float:
        """The share of an observed step that these parts take, from 0 to 1."""
        seconds = sum(self.parts.get(part, 0.0) for part in parts)
        return seconds / self.observed_s if self.observed_s else 0.0

    def to_json(self) -> dict[str, object]:
        """The JSON object of ``--json``, with what is derived."""
        return {**asdict(self), "regime": self.regime.value, "slow_down": self.slow_down}

    @classmethod
    def read(cls, json: Mapping[str, Any]) -> "Observation":
        """Return the observation that `to_json` has written."""
        fields = {name: value for name, value in json.items() if name in cls.__slots__}
        fields["waits"] = tuple(Wait(**wait) for wait in fields["waits"])
        fields["prices"] = tuple(_price(price) for price in fields["prices"])
        fields["together"] = None if fields["together"] is None else _price(fields["together"])
        return cls(**fields)


def _price(json: Mapping[str, Any]) -> Price:
    return Price(
        **{
            **json,
            "outcome": PriceOutcome(json["outcome"]),
            "beside": tuple(json["beside"]),
            "words": tuple((name, value) for name, value in json["words"]),
        }
    )
