"""A small network with convolutions, batch norm and a loss, as trials and candidates need it."""

import torch
from torch import Tensor, nn

from paceline.tuning.candidate import Objects, TrialSubject

SIZE = 8


def network() -> nn.Module:
    """(B, 2, 6, 6) -> logits (B, 3)."""
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    )


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(6)
    inputs = torch.randn(SIZE, 2, 6, 6, generator=generator)
    return inputs, torch.randint(0, 3, (SIZE,), generator=generator)


def loss_of(model: nn.Module, one: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(one[0]), one[1])


def subject(model: nn.Module | None = None, **changes: object) -> TrialSubject:
    """A subject on one worker of a machine with four cores, with everything allowed."""
    model = network() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    values: dict[str, object] = {
        "objects": Objects(model=model, optimizer=optimizer, sizes=frozenset({SIZE})),
        "device": torch.device("cpu"),
        "batch": batch(),
        "num_samples": SIZE,
        "forward": loss_of,
        "feed": None,
        "num_cores": 4,
        "num_workers": 1,
        "steps_itself": True,
        "may_change_numbers": True,
        **changes,
    }
    return TrialSubject(**values)  # type: ignore[arg-type]
