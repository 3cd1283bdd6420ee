"""setup, cleanup, main(rank, world_size), train and test as functions; ``mp.spawn``."""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WORLD_SIZE = 2


def setup(rank, world_size):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "29501"
    dist.init_process_group("nccl", rank=rank, world_size=world_size)


def cleanup():
    dist.destroy_process_group()


def train(model, rank, train_loader, optimizer, epoch, sampler=None):
    model.train()
    if sampler:
        sampler.set_epoch(epoch)
    for batch_idx, (data, target) in enumerate(train_loader):
        data, target = data.to(rank), target.to(rank)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), target)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        if rank == 0 and batch_idx == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")


def test(model, rank, test_loader):
    model.eval()
    correct = 0
    with torch.no_grad():
        for data, target in test_loader:
            data, target = data.to(rank), target.to(rank)
            correct += (model(data).argmax(dim=1) == target).sum().item()
    if rank == 0:
        print(f"accuracy {correct / len(test_loader.dataset):.4f}")


def main(rank, world_size):
    setup(rank, world_size)
    torch.cuda.set_device(rank)
    inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    train_set = TensorDataset(inputs, inputs[:, :3].argmax(dim=1))
    train_sampler = DistributedSampler(train_set, num_replicas=world_size, rank=rank, shuffle=True)
    train_loader = DataLoader(train_set, batch_size=4, sampler=train_sampler)
    test_loader = DataLoader(train_set, batch_size=32)
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)).to(rank)
    model = DDP(model, device_ids=[rank])
    optimizer = optim.SGD(model.parameters(), lr=0.5)
    scheduler = StepLR(optimizer, step_size=2, gamma=0.7)
    for epoch in range(6):
        train(model, rank, train_loader, optimizer, epoch, train_sampler)
        test(model, rank, test_loader)
        scheduler.step()
    dist.barrier()
    if rank == 0:
        torch.save(model.module.state_dict(), "model.pt")
    cleanup()


if __name__ == "__main__":
    mp.spawn(main, args=(WORLD_SIZE,), nprocs=WORLD_SIZE, join=True)
