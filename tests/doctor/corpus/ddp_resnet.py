import os

import torch
import torch.distributed as dist
import torchvision
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def main():
    dist.init_process_group(backend="gloo")  # <- gloo-for-devices
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    model = torchvision.models.resnet50().cuda(rank)
    model = DDP(model, device_ids=[rank])
    ds = torchvision.datasets.ImageFolder("/data/train", torchvision.transforms.ToTensor())
    sampler = DistributedSampler(ds)  # <- sampler-without-epoch
    loader = DataLoader(ds, batch_size=64, sampler=sampler, num_workers=8, pin_memory=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 30)
    loss_fn = torch.nn.CrossEntropyLoss()
    for epoch in range(90):
        model.train()
        for x, y in loader:
            x, y = x.cuda(rank, non_blocking=True), y.cuda(rank, non_blocking=True)
            loss = loss_fn(model(x), y)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        scheduler.step()
        torch.save(model.state_dict(), "last.pt")  # <- ranks-write-one-file


if __name__ == "__main__":
    main()
