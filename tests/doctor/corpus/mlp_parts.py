import torch
from torch import nn


class Head(nn.Module):
    def __init__(self, width):  # <- super-init-missing
        self.out = nn.Linear(width, 10)

    def forward(self, x):
        return self.out(x)


class Deep(nn.Module):
    def __init__(self, depth=4, width=128):
        super().__init__()
        self.blocks = [nn.Linear(width, width) for _ in range(depth)]  # <- unregistered-modules
        self.first = nn.Linear(784, width)
        self.head = Head(width)

    def forward(self, x):
        x = torch.relu(self.first(x))
        for block in self.blocks:
            x = torch.relu(block(x))
        return self.head(x)


class Flat(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(784, 512)  # <- linear-chain
        self.b = nn.Linear(512, 256)
        self.c = nn.Linear(256, 10)

    def forward(self, x):
        x = x.view(-1, 784)
        x = self.a(x)
        x = self.b(x)
        x = self.c(x)
        return x
