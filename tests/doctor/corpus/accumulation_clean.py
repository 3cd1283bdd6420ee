import torch
import torchvision
from torch import nn

device = torch.device("cuda")
model = torchvision.models.vit_b_16(num_classes=100).to(device)
data = torchvision.datasets.CIFAR100("data", transform=torchvision.transforms.ToTensor())
loader = torch.utils.data.DataLoader(data, 16, shuffle=True, pin_memory=True, num_workers=4)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
criterion = nn.CrossEntropyLoss()
every = 8
model.train()
optimizer.zero_grad()
for i, (x, y) in enumerate(loader):
    x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = criterion(model(x), y) / every
    loss.backward()
    if (i + 1) % every == 0:
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        print(i, loss.item() * every)
