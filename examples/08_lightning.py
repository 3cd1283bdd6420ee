"""A LightningModule under any protocol: one argument of the Trainer.

python examples/08_lightning.py --workers 4 --protocol k-batch-async:3
paceline launch --workers 2 --protocol local-sgd:2 examples/08_lightning.py
"""

import argparse

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from paceline.lightning import PacelineStrategy

parser = argparse.ArgumentParser()
parser.add_argument("--workers", type=int, default=1)
parser.add_argument("--protocol", help="without paceline launch, which has its own")
parser.add_argument("--epochs", type=int, default=2)
arguments = parser.parse_args()


class Rings(lightning.LightningModule):
    """Classifies a point of the plane by which of two rings it lies on."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))

    def loss(self, points: Tensor, rings: Tensor) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(self.layers(points), rings)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return self.loss(*batch)

    def validation_step(self, batch: list[Tensor]) -> None:
        self.log("loss", self.loss(*batch))

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking and self.trainer.is_global_zero:
            loss = self.trainer.callback_metrics["loss"]
            print(f"update {self.trainer.global_step}: validation loss {loss:.4f}")

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.02)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
        return {"optimizer": optimizer, "lr_scheduler": schedule}


def rings(num_points: int, seed: int) -> TensorDataset:
    """Return points at a distance of about 1 and about 2 from the origin."""
    generator = torch.Generator().manual_seed(seed)
    rings = torch.randint(2, (num_points, 1), generator=generator).float()
    angles = 2 * torch.pi * torch.rand(num_points, 1, generator=generator)
    radii = 1 + rings + 0.1 * torch.randn(num_points, 1, generator=generator)
    return TensorDataset(radii * torch.cat([angles.cos(), angles.sin()], 1), rings)


lightning.seed_everything(0)
trainer = lightning.Trainer(
    strategy=PacelineStrategy(arguments.protocol),
    accelerator="cpu",
    devices=arguments.workers,
    max_epochs=arguments.epochs,
    gradient_clip_val=1.0,
    enable_progress_bar=False,
    enable_model_summary=False,
    logger=False,
    enable_checkpointing=False,
)
trainer.fit(
    Rings(),
    DataLoader(rings(2048, 1), batch_size=64, shuffle=True),
    DataLoader(rings(512, 2), batch_size=256),
)
