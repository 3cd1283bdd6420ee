import torch
import torchvision
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR, ReduceLROnPlateau

data = torchvision.datasets.CIFAR10("data", transform=torchvision.transforms.ToTensor())
loader = torch.utils.data.DataLoader(data, batch_size=128, shuffle=True)
net = nn.Sequential(nn.Flatten(), nn.Linear(3072, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
one_cycle = OneCycleLR(optimizer, max_lr=0.4, epochs=10, steps_per_epoch=len(loader))
plateau = ReduceLROnPlateau(optimizer)
decay = ExponentialLR(optimizer, 0.9)  # <- scheduler-unused
for epoch in range(10):
    for x, y in loader:
        optimizer.zero_grad()
        scores = net(x)
        guess = scores.argmax(dim=1)
        loss = nn.functional.cross_entropy(guess.float(), y.float())  # <- argmax-into-loss
        loss.requires_grad = True  # <- graph-cut
        loss.backward()
        optimizer.step()
    one_cycle.step()  # <- one-cycle-per-epoch
    plateau.step()  # <- plateau-without-metric
