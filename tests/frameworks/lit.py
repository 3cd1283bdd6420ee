"""A script with a Trainer, trained in every way: python lit.py FOLDER '{"strategy": "ddp"}'

Each worker saves its result in FOLDER/worker-N.pt.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    ModelCheckpoint,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from paceline.lightning import PacelineStrategy

NUM, BATCH = 48, 8
torch.set_default_dtype(torch.float64)
FOLDER = Path(sys.argv[1])
OPTIONS: dict[str, Any] = {
    "strategy": "paceline", "protocol": None, "workers": 1, "epochs": 2, "schedule": "epoch",
    "settings": {}, "batch": BATCH, "trainer": {}, "patience": None, "ckpt_path": None,
    "stop": None, "groups": None,
    **json.loads(sys.argv[2]),
}  # fmt: skip


class Net(lightning.LightningModule):
    """A small regression that records the hooks the loop called."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
        self.steps: list[int] = []
        self.rates: list[float] = []
        self.losses: list[float] = []
        self.sums: list[float] = []
        self.ranks: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self.layers(batch[0]), batch[1])
        self.log("train_loss", loss, on_epoch=True, sync_dist=True)
        num = float(len(batch[0]))
        self.log("num", num, on_step=False, on_epoch=True, sync_dist=True, reduce_fx="sum")
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        if OPTIONS["stop"] == [self.trainer.global_rank, len(self.steps)]:
            self.trainer.should_stop = True
        self.steps.append(self.trainer.global_step)
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def validation_step(self, batch: list[Tensor]) -> None:
        loss = nn.functional.mse_loss(self.layers(batch[0]), batch[1])
        self.log("val_loss", loss, sync_dist=True)
        self.log("val_sum", loss, sync_dist=True, on_epoch=True, reduce_fx="sum")

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.losses.append(self.trainer.callback_metrics["val_loss"].item())
            self.sums.append(self.trainer.callback_metrics["val_sum"].item())
        if self.trainer.state.fn == "fit" and not self.trainer.sanity_checking:
            own = torch.tensor([1.0, self.global_rank])
            self.ranks = self.all_gather(own)[..., 1].flatten().tolist()

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        if OPTIONS["schedule"] == "plateau":
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=9)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"},
            }
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        interval = {"scheduler": schedule, "interval": OPTIONS["schedule"]}
        return {"optimizer": optimizer, "lr_scheduler": interval}


def samples(num: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(num)
    inputs = torch.randn(num, 3, generator=generator)
    return TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))


def main() -> None:
    callbacks: list[Any] = [ModelCheckpoint(FOLDER / "kept", monitor="val_loss", save_last=True)]
    if OPTIONS["patience"] is not None:
        callbacks.append(EarlyStopping("val_loss", patience=OPTIONS["patience"], min_delta=9.0))
    if OPTIONS["groups"] is not None:
        groups = {int(epoch): number for epoch, number in OPTIONS["groups"].items()}
        callbacks.append(GradientAccumulationScheduler(groups))
    strategy: Any = "auto" if OPTIONS["strategy"] == "single" else OPTIONS["strategy"]
    if strategy == "paceline":
        strategy = PacelineStrategy(OPTIONS["protocol"], **OPTIONS["settings"])
    net = Net()
    trainer = lightning.Trainer(
        strategy=strategy, accelerator="cpu", devices=OPTIONS["workers"], logger=False,
        max_epochs=OPTIONS["epochs"], callbacks=callbacks, enable_progress_bar=False,
        enable_model_summary=False, **OPTIONS["trainer"],
    )  # fmt: skip
    # In order, so that all ways have the same batches.
    data, sampler = samples(NUM), None
    if strategy == "ddp":
        rank = int(os.environ.get("LOCAL_RANK", 0))
        sampler = DistributedSampler(data, OPTIONS["workers"], rank, shuffle=False)
    loader = DataLoader(data, batch_size=OPTIONS["batch"], sampler=sampler)
    trainer.fit(net, loader, DataLoader(samples(6), batch_size=6), ckpt_path=OPTIONS["ckpt_path"])
    found = {
        "state": net.state_dict(), "step": trainer.global_step, "epoch": trainer.current_epoch,
        "steps": net.steps, "rates": net.rates, "losses": net.losses, "sums": net.sums,
        "ranks": net.ranks,
        "rate": trainer.optimizers[0].param_groups[0]["lr"],
        "best": callbacks[0].best_model_path,
        "train_loss": trainer.callback_metrics["train_loss_epoch"].item(),
        "num": trainer.callback_metrics["num"].item(),
        "tested": trainer.validate(net, DataLoader(samples(6), batch_size=6), verbose=False),
    }  # fmt: skip
    torch.save(found, FOLDER / f"worker-{trainer.global_rank}.pt")
    if strategy == "ddp":  # gloo's threads may abort a process during Python's shutdown
        torch.distributed.barrier()
        os._exit(0)


if __name__ == "__main__":
    main()
