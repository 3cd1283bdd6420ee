"""train(rank, a, h) with several networks and two optimizers, in a group if there are GPUs."""

import warnings

warnings.simplefilter(action="ignore", category=FutureWarning)
import itertools  # noqa: E402
import os  # noqa: E402
from types import SimpleNamespace  # noqa: E402

import torch  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed import init_process_group  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset  # noqa: E402


def train(rank, a, h):
    if h.num_gpus > 1:
        init_process_group(backend="nccl", world_size=h.num_gpus, rank=rank)

    torch.cuda.manual_seed(h.seed)
    device = torch.device(f"cuda:{rank:d}")

    generator = nn.Linear(8, 3).to(device)
    first = nn.Linear(8, 3).to(device)
    second = nn.Linear(8, 3).to(device)

    if rank == 0:
        os.makedirs(a.checkpoint_path, exist_ok=True)

    if h.num_gpus > 1:
        generator = DistributedDataParallel(generator, device_ids=[rank]).to(device)
        first = DistributedDataParallel(first, device_ids=[rank]).to(device)
        second = DistributedDataParallel(second, device_ids=[rank]).to(device)

    optim_g = torch.optim.SGD(generator.parameters(), h.learning_rate)
    optim_d = torch.optim.SGD(
        itertools.chain(first.parameters(), second.parameters()), h.learning_rate
    )
    scheduler_g = torch.optim.lr_scheduler.ExponentialLR(optim_g, gamma=0.9, last_epoch=-1)

    inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    trainset = TensorDataset(inputs, inputs[:, :3].argmax(dim=1))
    train_sampler = DistributedSampler(trainset) if h.num_gpus > 1 else None
    train_loader = DataLoader(
        trainset, shuffle=False, sampler=train_sampler, batch_size=h.batch_size, drop_last=True
    )

    generator.train()
    for epoch in range(max(0, -1), a.training_epochs):
        if h.num_gpus > 1:
            train_sampler.set_epoch(epoch)

        for i, (x, y) in enumerate(train_loader):
            x, y = x.to(device), y.to(device)
            optim_d.zero_grad()
            loss = nn.functional.cross_entropy(first(x) + second(x), y)
            loss.backward()
            optim_d.step()

            optim_g.zero_grad()
            loss = (generator(x) - first(x).detach()).square().mean()
            loss.backward()
            optim_g.step()
            if rank == 0 and i == 0:
                print(f"epoch {epoch} loss {loss.item():.4f}")
        if rank == 0:
            state = (generator.module if h.num_gpus > 1 else generator).state_dict()
            torch.save(state, f"{a.checkpoint_path}/g_{epoch}")
        scheduler_g.step()


def main():
    a = SimpleNamespace(checkpoint_path="kept", training_epochs=6)
    h = SimpleNamespace(num_gpus=0, seed=3, learning_rate=0.5, batch_size=8)
    torch.manual_seed(h.seed)
    if torch.cuda.is_available():
        h.num_gpus = torch.cuda.device_count()
        h.batch_size = int(h.batch_size / h.num_gpus)

    if h.num_gpus > 1:
        mp.spawn(train, nprocs=h.num_gpus, args=(a, h))
    else:
        train(0, a, h)


if __name__ == "__main__":
    main()
