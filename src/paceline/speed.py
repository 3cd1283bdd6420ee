"""How one worker computes: the options that the user or ``--fast auto`` chooses.

Each field belongs to one candidate (``tuning/candidates.py``), which knows what to try and how to
put it into effect. All but ``precision`` leave the numbers as they are, up to rounding. This module
must not import torch: the launcher reads it.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeAlias

from .fields import boolean, by_name, count, many, real, record

Value: TypeAlias = str | int | bool

AS_IT_IS = "as it is"


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """One way to compute; the defaults leave everything as the script made it.

    Attributes:
        threads: CPU threads of a worker; 0: as many as it was started with.
        keep_memory: whether freed memory stays with the process.
        optimizer: ``as it is``, ``foreach`` or ``fused``: the kernel of the optimizer's step.
        channels_last: whether 4-dimensional weights lie in memory with their channels last.
        compile: ``none`` or a mode of ``torch.compile``.
        precision: ``fp32``, ``bf16`` or ``fp16``: of forward passes under ``pace.autocast()``.
        loader_workers: processes that load batches ahead; -1: the loader's own number.
        ahead: whether the next batch is copied to the device while this one is computed.
    """

    threads: int = 0
    keep_memory: bool = False
    optimizer: str = AS_IT_IS
    channels_last: bool = False
    compile: str = "none"
    precision: str = "fp32"
    loader_workers: int = -1
    ahead: bool = False

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> "Speed":
        """From JSON; fields of another version are left out."""
        names = {field.name for field in fields(cls)}
        return record(cls, {name: value for name, value in values.items() if name in names})

    def write(self) -> dict[str, Value]:
        return asdict(self)

    def having(self, name: str, value: Value) -> "Speed":
        """Return a copy with another value of one field."""
        return Speed.read({**self.write(), name: value})

    def is_chosen(self, name: str) -> bool:
        """Whether a field is not the default."""
        return bool(getattr(self, name) != getattr(Speed(), name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The measured gain of one candidate.

    Attributes:
        name: the field of ``Speed``.
        what: the option as text: ``compile default``.
        gain: seconds a step without it : with it, the median of interleaved pairs; 0 where it
            could not be measured.
        low, high: the quartiles of that ratio.
        is_kept: whether it is part of the choice.
        once_s: seconds that it costs once, before the first step (compilation).
        was_tried: whether there was time for it.
        reason: why it was not measured, or a remark.
        is_apart: whether it was measured separately, with batches from the loader or on a whole
            batch, and is no part of ``before_s`` and ``after_s``.
    """

    name: str
    what: str
    gain: float = 0.0
    low: float = 0.0
    high: float = 0.0
    is_kept: bool = False
    once_s: float = 0.0
    was_tried: bool = True
    reason: str = ""
    is_apart: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a trial.

    Attributes:
        before_s, after_s: seconds a step without and with the whole choice.
        num_samples: samples of the measured batches.
        batch_size: samples of the batches that will be trained on.
        took_s: seconds of the whole trial.
        is_steady: whether repeats agree, so that no other load disturbed the trial.
    """

    speed: Speed
    findings: tuple[Finding, ...]
    before_s: float
    after_s: float
    num_samples: int
    batch_size: int
    took_s: float
    is_steady: bool = True

    @property
    def is_whole(self) -> bool:
        """Whether there was time for everything."""
        return all(finding.was_tried for finding in self.findings)

    def write(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> "Outcome":
        """From JSON.

        Raises:
            TypeError, ValueError, KeyError: the value is damaged, or of another version.
        """
        findings = many(lambda one: record(Finding, one))(values["findings"])
        speed = Speed.read(by_name(lambda one: one)(values["speed"]))
        sizes = (values["num_samples"], values["batch_size"])
        times_s = (values["before_s"], values["after_s"])
        if min(map(count, sizes)) < 1 or min(map(real, times_s)) <= 0.0:
            raise ValueError("num_samples, batch_size, before_s and after_s must be above 0")
        return cls(
            speed=speed, findings=findings, before_s=real(values["before_s"]),
            after_s=real(values["after_s"]), num_samples=count(values["num_samples"]),
            batch_size=count(values["batch_size"]), took_s=real(values["took_s"]),
            is_steady=boolean(values.get("is_steady", True)),
        )  # fmt: skip

    def lines(self) -> list[str]:
        """Return the result as sentences: what was kept, the total, what was not kept."""
        kept = [
            _kept(finding, self._saved_s(finding)) for finding in self.findings if finding.is_kept
        ]
        rest = [_left(finding) for finding in self.findings if not finding.is_kept]
        apart = [finding.what for finding in self.findings if finding.is_kept and finding.is_apart]
        is_sum = any(not finding.is_apart for finding in self.findings if finding.is_kept)
        without = f" beside {' and '.join(apart)}" if apart else ""
        together = (
            f"; together {self.before_s / self.after_s:.2f}x, {1000 * self.before_s:.1f} -> "
            f"{1000 * self.after_s:.1f} ms a step{without}" if is_sum else ""
        )  # fmt: skip
        is_cut = self.num_samples < self.batch_size and (is_sum or not apart)
        cut = f", on {self.num_samples} of {self.batch_size} samples" if is_cut else ""
        lines = [f"fast: {', '.join(kept) or 'nothing helps here'}{together}{cut}"]
        if rest:
            lines.append(f"fast: not kept: {', '.join(rest)}")
        return lines

    def _saved_s(self, finding: Finding) -> float:
        """Return the seconds that the option saves in a step of training."""
        share = self.batch_size / self.num_samples
        return self.after_s * share * (finding.gain - 1.0)


def _kept(finding: Finding, saved_s: float) -> str:
    text = f"{finding.what} {finding.gain:.2f}x"
    if finding.once_s and saved_s > 0:
        steps = finding.once_s / saved_s
        text += f" ({finding.once_s:.0f} s once, repaid after {steps:,.0f} steps)"
    return text


def _left(finding: Finding) -> str:
    worth = f"{finding.gain:.2f}x" if finding.gain else ""
    return " ".join(
        part for part in (finding.what, worth, f"({finding.reason})" * bool(finding.reason)) if part
    )
