"""A script of this corpus: a loop as a user writes it, and its requirements as data.

    Script(text, refused=several("write pace.clip_grad_norm_"))

The text calls ``paceline.connect()`` and trains; ``record`` notes what is compared. Run with a
stand-in for Paceline that does nothing, the same text is its plain twin. This module must not know
how a script is run or compared.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

SAMPLES, EPOCHS = 64, 3
"""For scripts that test something else: 8 batches of 8 samples per epoch, which 4 workers share, or
2 workers under local-sgd:4 take in two rounds."""

DOUBLE = torch.float64

Numbers: TypeAlias = dict[str, list[Tensor]]
"""The notes under each name, in order."""


@dataclass(slots=True)
class Noted:
    """The notes of one worker or of the twin.

    Attributes:
        facts: the same under every configuration.
        epochs: the same in all workers; the twin's in lockstep.
        steps: of each step; the same in all workers and the twin's in lockstep.
        parts: of a worker's part of each step; in lockstep their mean is the twin's.
        used: the samples of each step; in lockstep those of all workers are the twin's.
        weights: parameters and buffers; the same in all workers, the twin's in lockstep.
        moments: the optimizer's state; the twin's in lockstep.
    """

    facts: Numbers = field(default_factory=dict)
    epochs: Numbers = field(default_factory=dict)
    steps: Numbers = field(default_factory=dict)
    parts: Numbers = field(default_factory=dict)
    used: Numbers = field(default_factory=dict)
    weights: Numbers = field(default_factory=dict)
    moments: Numbers = field(default_factory=dict)


class Record:
    """The recorder of a script.

    Attributes:
        folder: where the script may write files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.noted = Noted()

    def fact(self, **values: Any) -> None:
        """Numbers that no protocol changes: counts, orders of calls, the last learning rate."""
        _add(self.noted.facts, values)

    def epoch(self, **values: Any) -> None:
        """Numbers that hold between epochs."""
        _add(self.noted.epochs, values)

    def step(self, **values: Any) -> None:
        """Numbers that hold for a whole step."""
        _add(self.noted.steps, values)

    def part(self, **values: Any) -> None:
        """Means over this worker's part of a step."""
        _add(self.noted.parts, values)

    def used(self, indices: Any) -> None:
        """The samples of a step, by their numbers."""
        _add(self.noted.used, {"samples": indices})

    def state(self, model: nn.Module, optimizer: Optimizer | None = None) -> None:
        """Model and optimizer between two epochs or at the end."""
        _add(self.noted.weights, dict(model.state_dict()))
        if optimizer is None:
            return
        for number, state in optimizer.state_dict()["state"].items():
            values = {f"{number} {key}": one for key, one in state.items() if one is not None}
            _add(self.noted.moments, values)


def _add(numbers: Numbers, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        exact = value.detach() if isinstance(value, Tensor) else torch.tensor(value, dtype=DOUBLE)
        numbers.setdefault(name, []).append(exact.to(DOUBLE, copy=True))


@dataclass(frozen=True, slots=True)
class Configuration:
    """One way to run a script.

    Attributes:
        is_lockstep: whether every update combines the parts of one batch of all workers.
    """

    name: str
    protocol: str = ""
    workers: int = 1

    @property
    def is_lockstep(self) -> bool:
        return self.protocol == "full-sync"

    @property
    def is_local(self) -> bool:
        """Whether the script's optimizer steps separately in each worker."""
        return self.protocol.startswith("local-sgd")


PLAIN = Configuration("plain")
SEVERAL = (
    Configuration("full-sync, 2", "full-sync", 2),
    Configuration("full-sync, 4", "full-sync", 4),
    Configuration("k-sync:1, 2", "k-sync:1", 2),
    Configuration("k-batch-async:2, 2", "k-batch-async:2", 2),
    Configuration("local-sgd:4, 2", "local-sgd:4", 2),
)
CONFIGURATIONS = (PLAIN, *SEVERAL)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A refusal by name.

    Args:
        says: a regular expression that its sentence must match.
        is_early: whether it comes before the first step.
        is_sure: whether the script must be refused; otherwise it may be refused or right.
    """

    says: str
    is_early: bool = False
    is_sure: bool = True

    def __post_init__(self) -> None:
        re.compile(self.says)


Refusals: TypeAlias = Mapping[str, Refusal]
"""By the name of a configuration."""


def everywhere(says: str, **options: bool) -> Refusals:
    """Refused with several workers; a single one may behave as plain PyTorch."""
    alone = Refusal(says, is_sure=False)
    return {PLAIN.name: alone, **several(says, **options)}


def several(says: str, **options: bool) -> Refusals:
    """Refused by every configuration of several workers."""
    return {one.name: Refusal(says, **options) for one in SEVERAL}


def gathered(says: str, **options: bool) -> Refusals:
    """Refused where an update averages several gradients: by full-sync and k-batch-async."""
    alone = ("k-sync:1",)  # an update is one push, so a part is the whole
    names = [one.name for one in SEVERAL if not one.is_local]
    return {one: Refusal(says, **options) for one in names if not one.startswith(alone)}


def pushed(says: str, **options: bool) -> Refusals:
    """Refused where workers push gradients: with several workers by all but local-sgd."""
    return {one.name: Refusal(says, **options) for one in SEVERAL if not one.is_local}


def loose(says: str, **options: bool) -> Refusals:
    """Refused where workers run at their own pace: neither full-sync nor local-sgd."""
    return {
        one.name: Refusal(says, **options)
        for one in SEVERAL
        if not one.is_lockstep and not one.is_local
    }


def not_lockstep(says: str, **options: bool) -> Refusals:
    """Refused with several workers by all but full-sync."""
    return {one.name: Refusal(says, **options) for one in SEVERAL if not one.is_lockstep}


Text: TypeAlias = Callable[[Record], None]


@dataclass(frozen=True, slots=True)
class Script:
    """One script and its requirements.

    Args:
        text: the script; its docstring describes it in a few words.
        like: the text of the twin, if it differs from the script.
        like_several: the same for several workers only.
        is_exact: whether full-sync computes what one process does. Where it does not (dropout,
            batch norm, random augmentation), it is compared with the inline engine instead.
        is_repeatable: whether two runs of it are the same; of one that draws from what no seed
            reaches, full-sync must use the samples that its twin uses, in whatever order.
        shuffles: whether the order is drawn: under full-sync the twin draws it as Paceline does,
            from the seed and the epoch.
        falls: whether the loss falls.
        uses_all: whether every epoch uses each sample once; otherwise each at most once.
        counts_itself: whether it ends by a worker's own count of steps; where workers run at their
            own pace it is only required to end.
        num_samples: an epoch has, as positions of its sampler.
        epochs: that come to their end.
        refused: by which configurations, and how.
    """

    text: Text
    like: Text | None = None
    like_several: Text | None = None
    is_exact: bool = True
    is_repeatable: bool = True
    shuffles: bool = False
    falls: bool = True
    uses_all: bool = True
    counts_itself: bool = False
    num_samples: int = SAMPLES
    epochs: int = EPOCHS
    refused: Refusals = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.text.__name__

    @property
    def summary(self) -> str:
        """A description in a few words."""
        return (self.text.__doc__ or "").strip().rstrip(".")

    def twin(self, configuration: Configuration) -> Text:
        """The plain script that computes the same as this configuration."""
        if configuration != PLAIN and self.like_several is not None:
            return self.like_several
        return self.like or self.text
