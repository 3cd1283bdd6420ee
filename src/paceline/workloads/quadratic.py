"""A strongly convex quadratic with known constants: the case that the theory covers.

    F(w)    = 1/2 (w - w*)^T A (w - w*),   A diagonal, eigenvalues from c to L
    f_i(w)  = F(w) - z_i . (w - w*)        one sample, the z_i sum to zero
    grad f_i = A (w - w*) - z_i            so the noise does not depend on w: M_G = 0

The mean over all samples is F itself, so evaluating the model gives F(w) - F* exactly. It must not
know images, nor which bound it is compared with.

Source: the assumptions of Dutta, Joshi, Ghosh, Dube, Nagpurkar, "Slow and Stale Gradients Can Win
the Race", AISTATS 2018, section 4.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..data.arrays import ArrayDataset, Splits
from ..data.fetch import Chooser, choose_here
from .base import Task, chosen_init, loss_metrics

NUM_DIMS = 32
NUM_SAMPLES = 4096
_SEED = 18


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """The constants of the theorems, for this quadratic.

    Args:
        smoothness: L, the largest eigenvalue of A.
        convexity: c, the smallest.
        noise_variance: sigma^2 = mean of ||z_i||^2, for a mini-batch of one sample.
        start_gap: F(w_0) - F*, with w_0 = 0.
    """

    smoothness: float
    convexity: float
    noise_variance: float
    start_gap: float
    optimum_loss: float = 0.0


class Quadratic(nn.Module):
    """f_i at the parameters w, for each z_i of a batch: (B, D) -> (B); w starts at 0."""

    curvature: Tensor
    optimum: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(NUM_DIMS))
        # Constants of the task and no state of a run: they are not in the state dict.
        self.register_buffer("curvature", _curvature(), persistent=False)
        self.register_buffer("optimum", _optimum(), persistent=False)

    def forward(self, noise: Tensor) -> Tensor:
        gap = self.w - self.optimum
        return 0.5 * (self.curvature * gap * gap).sum() - noise @ gap


def constants() -> Constants:
    """Return the constants of F, computed from the samples."""
    curvature, optimum, noise = _curvature(), _optimum(), _noise()
    return Constants(
        smoothness=curvature.max().item(),
        convexity=curvature.min().item(),
        noise_variance=noise.square().sum(dim=1).mean().item(),
        start_gap=0.5 * (curvature * optimum * optimum).sum().item(),
    )


def mean_of_values(outputs: Tensor, targets: Tensor) -> Tensor:
    """The loss: the outputs are the values of f_i already; there are no targets to compare."""
    return outputs.mean()


def samples() -> Splits:
    """Return the z_i, for training and testing, because their mean is F itself."""
    data = ArrayDataset(_noise(), torch.zeros(NUM_SAMPLES))
    source = f"a quadratic in {NUM_DIMS} dimensions ({NUM_SAMPLES:,} noise vectors, made up)"
    return Splits(train=data, test=data, source=source)


def quadratic(
    num_workers: int = 1, init: str | None = None, chooser: Chooser = choose_here
) -> Task:
    """The quadratic; it starts at 0, and ``init`` is "default"."""
    chosen_init("quadratic", init, ("default",))
    return Task(
        name="quadratic",
        model=Quadratic,
        loss=mean_of_values,
        data=samples,
        learning_rate=0.1,
        batch_size=64,
        epochs=10,
        metrics=loss_metrics(mean_of_values),
        notes=("loss is F(w) - F*: its optimum is 0, and there is no accuracy",),
    )


def _curvature() -> Tensor:
    return torch.linspace(0.1, 1.0, NUM_DIMS)


def _optimum() -> Tensor:
    return torch.randn(NUM_DIMS, generator=torch.Generator().manual_seed(_SEED))


def _noise() -> Tensor:
    generator = torch.Generator().manual_seed(_SEED + 1)
    noise = torch.randn(NUM_SAMPLES, NUM_DIMS, generator=generator, dtype=torch.float64)
    # The mean over an epoch is exactly F only if the noise sums to zero.
    return (noise - noise.mean(dim=0)).to(torch.float32)
