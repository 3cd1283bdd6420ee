"""Training on compressed gradients: with the residual it converges, without it top-k does not."""

import pytest
import torch
from torch import Tensor, nn

from compressing import example, exchange, make_members
from paceline.compression import COMPRESSORS, parse
from paceline.compression.base import Matrix

UPDATES = 300


def train(name: str | None, *, has_feedback: bool = True) -> float:
    """The loss of a classifier trained by two members, each on classes of its own.

    Each member's gradients are large where the other's are, with the other sign: those of the
    biases, since each believes that there are only its own classes. What tells classes apart is
    smaller in each of them, and is what both have in common.
    """
    torch.manual_seed(0)
    model = nn.Linear(20, 4).double()
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    generator = torch.Generator().manual_seed(1)
    centers = 0.5 * torch.randn(4, 20, generator=generator, dtype=torch.float64)
    classes = [torch.arange(400) % 2 + 2 * member for member in (0, 1)]
    inputs = [
        centers[one] + 0.3 * torch.randn(400, 20, generator=generator, dtype=torch.float64)
        for one in classes
    ]
    matrices = (Matrix(start=0, rows=4, columns=20, number=0),)
    compression = None if name is None else parse(name)
    members = make_members(compression, 84, 2, matrices, torch.float64) if compression else []
    parameters = list(model.parameters())

    def gradient(member: int) -> Tensor:
        loss = nn.functional.cross_entropy(model(inputs[member]), classes[member])
        return torch.cat([one.view(-1) for one in torch.autograd.grad(loss, parameters)])

    for _ in range(UPDATES):
        owns = [gradient(0), gradient(1)]
        if members:
            (mean, _), _ = exchange(members, owns, [0.5, 0.5])
        else:
            mean = (owns[0] + owns[1]) / 2
        for one in members if has_feedback else []:
            one.keep()
        with torch.no_grad():
            for parameter, part in zip(parameters, mean.split([80, 4]), strict=True):
                parameter -= 0.5 * part.view_as(parameter)
    with torch.no_grad():
        outputs = model(torch.cat(inputs))
        return float(nn.functional.cross_entropy(outputs, torch.cat(classes)))


@pytest.mark.parametrize("name", COMPRESSORS)
def test_compressed_training_reaches_the_uncompressed_loss(name: str) -> None:
    assert train(example(name)) < 1.1 * train(None)


def test_top_k_without_the_residual_does_not_converge() -> None:
    plain, without = train(None), train("topk:2%", has_feedback=False)
    assert without > 3 * plain
    assert train("topk:2%") < 1.1 * plain
