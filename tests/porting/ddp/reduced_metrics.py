"""main(args) for torchrun; amp, a progress bar, metrics that are reduced over all ranks."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torch.utils.data.distributed import DistributedSampler


def progress(iterable):
    return iterable


def evaluate(model, loader, device):
    model.eval()
    right = torch.zeros(1, device=device)
    with torch.no_grad():
        for x, y in loader:
            right += (model(x.to(device)).argmax(dim=1) == y.to(device)).sum()
    dist.all_reduce(right, op=dist.ReduceOp.SUM)
    return right.item() / len(loader.dataset)


def main(args):
    dist.init_process_group(backend="nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    inputs = torch.randn(96, 8, generator=torch.Generator().manual_seed(1))
    whole = TensorDataset(inputs, inputs[:, :3].argmax(dim=1))
    train_set, val_set = random_split(whole, [64, 32], generator=torch.Generator().manual_seed(3))
    train_sampler = DistributedSampler(train_set, shuffle=True)
    val_sampler = DistributedSampler(val_set, shuffle=False)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, sampler=train_sampler)
    val_loader = DataLoader(val_set, batch_size=32, sampler=val_sampler)
    torch.manual_seed(2)
    model = nn.Linear(8, 3).to(device)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model = nn.parallel.DistributedDataParallel(
        model, device_ids=[local_rank], output_device=local_rank
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        model.train()
        train_sampler.set_epoch(epoch)
        for x, y in progress(train_loader):
            x, y = x.to(device), y.to(device)
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        accuracy = evaluate(model, val_loader, device)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} accuracy {accuracy:.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--lr", type=float, default=0.5)
    parser.add_argument("--batch-size", type=int, default=4)
    main(parser.parse_args())
