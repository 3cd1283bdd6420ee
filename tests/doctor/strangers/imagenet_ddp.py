import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torchvision
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import transforms


def main():
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)

    augment = transforms.Compose(
        [
            transforms.RandomResizedCrop(224),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
        ]
    )
    train_set = torchvision.datasets.ImageFolder("imagenet/train", augment)
    val_set = torchvision.datasets.ImageFolder("imagenet/val", augment)  # wrong: validated on randomly cropped pictures
    sampler = DistributedSampler(train_set, shuffle=True)
    train_loader = DataLoader(train_set, batch_size=64, sampler=sampler)  # wrong: no loading processes for pictures that are decoded and cropped
    val_loader = DataLoader(val_set, batch_size=64, num_workers=8)

    model = torchvision.models.resnet50().cuda(local_rank)
    model = DistributedDataParallel(model, device_ids=[local_rank])
    criterion = nn.CrossEntropyLoss().cuda(local_rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30, gamma=0.1)

    for epoch in range(90):  # wrong: sampler.set_epoch is never called: each epoch has the same order
        model.train()
        for step, (images, labels) in enumerate(train_loader):
            images = images.cuda(local_rank)
            labels = labels.cuda(local_rank)
            loss = criterion(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 50 == 0 and rank == 0:
                print(f"[{epoch}] {step}/{len(train_loader)} {loss.item():.3f}")
        scheduler.step()

        model.eval()
        hits = total = 0
        with torch.no_grad():
            for images, labels in val_loader:
                out = model(images.cuda(local_rank))
                hits += (out.argmax(1).cpu() == labels).sum().item()
                total += len(labels)
        if rank == 0:
            print(f"epoch {epoch}: {hits / total:.4f}")
        torch.save(model.module.state_dict(), "resnet50.pt")  # wrong: each process writes the same file


if __name__ == "__main__":
    main()
