"""A Trainer whose one loop trains and tests, by an argument; loaders are made by a method."""

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


@dataclass
class Config:
    max_epochs: int = 3
    batch_size: int = 4


class Trainer:
    def __init__(self, config: Config, model: nn.Module, train: Dataset, test: Dataset):
        self.config = config
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.train_loader = self._prepare_dataloader(train)
        self.test_loader = self._prepare_dataloader(test)
        self.model = model.to(self.local_rank)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.model = DDP(self.model, device_ids=[self.local_rank])

    def _prepare_dataloader(self, dataset: Dataset):
        return DataLoader(
            dataset, batch_size=self.config.batch_size, sampler=DistributedSampler(dataset)
        )

    def _run_batch(self, source, targets, train: bool = True) -> float:
        with torch.set_grad_enabled(train):
            loss = nn.functional.mse_loss(self.model(source), targets)
        if train:
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self.optimizer.step()
        return loss.item()

    def _run_epoch(self, epoch: int, dataloader: DataLoader, train: bool = True):
        dataloader.sampler.set_epoch(epoch)
        for source, targets in dataloader:
            source, targets = source.to(self.local_rank), targets.to(self.local_rank)
            loss = self._run_batch(source, targets, train)
        print(f"epoch {epoch} {'train' if train else 'test'} {loss:.4f}")

    def train(self):
        for epoch in range(self.config.max_epochs):
            self._run_epoch(epoch, self.train_loader, train=True)
            self._run_epoch(epoch, self.test_loader, train=False)


if __name__ == "__main__":
    dist.init_process_group("nccl")
    inputs = torch.randn(64, 8)
    data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    Trainer(Config(), nn.Linear(8, 1), data, data).train()
    dist.destroy_process_group()
