"""Pre-trains a small ViT. torchrun --nproc_per_node=8 research_trainer_ddp.py --data /data/in1k"""

import argparse
import logging
import os
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torchvision import datasets, models, transforms

log = logging.getLogger(__name__)


@dataclass
class Config:
    data: Path
    epochs: int = 90
    batch_size: int = 128
    accumulate: int = 4
    lr: float = 3e-4
    weight_decay: float = 0.05


class Trainer:
    def __init__(self, cfg: Config) -> None:
        self.cfg = cfg
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.device = torch.device("cuda", self.local_rank)
        torch.cuda.set_device(self.device)
        net = models.vit_b_16(num_classes=1000).to(self.device)
        self.model = DDP(net, device_ids=[self.local_rank], find_unused_parameters=True)  # wrong: every parameter of it is used
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=cfg.lr, weight_decay=cfg.weight_decay)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=cfg.epochs)
        self.train_loader = self.make_loader()

    def make_loader(self) -> DataLoader:
        tf = transforms.Compose([
            transforms.RandomResizedCrop(224),
            transforms.RandAugment(),
            transforms.ToTensor(),
            transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
        ])
        data = datasets.ImageFolder(str(self.cfg.data / "train"), tf)
        return DataLoader(data, batch_size=self.cfg.batch_size, shuffle=True, num_workers=12,  # wrong: no DistributedSampler: each process goes over all pictures
                          pin_memory=True, drop_last=True, persistent_workers=True)

    def train_epoch(self, epoch: int) -> None:
        self.model.train()
        for i, (x, y) in enumerate(self.train_loader):
            x = x.to(self.device, non_blocking=True)
            y = y.to(self.device, non_blocking=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = self.criterion(self.model(x), y) / self.cfg.accumulate
            loss.backward()  # wrong: gradients are averaged over the processes for each of the 4, no no_sync()
            if (i + 1) % self.cfg.accumulate == 0:
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)
            if i % 200 == 0 and dist.get_rank() == 0:
                log.info("epoch %d step %d loss %.4f", epoch, i, loss.item() * self.cfg.accumulate)

    def save(self, epoch: int) -> None:
        if dist.get_rank() == 0:
            torch.save({"model": self.model.module.state_dict(), "epoch": epoch}, "vit.pt")

    def fit(self) -> None:
        for epoch in range(self.cfg.epochs):
            self.train_epoch(epoch)
            self.scheduler.step()
            self.save(epoch)


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=90)
    args = parser.parse_args()
    dist.init_process_group("nccl")
    Trainer(Config(data=args.data, epochs=args.epochs)).fit()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
