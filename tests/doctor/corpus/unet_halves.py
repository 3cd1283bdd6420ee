import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.conv = nn.Conv2d(i, o, 3, padding=1)  # <- bias-before-norm
        self.norm = nn.BatchNorm2d(o)

    def forward(self, x):
        return torch.relu(self.norm(self.conv(x)))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = Block(3, 64)
        self.b = Block(64, 128)
        self.pool = nn.MaxPool2d(2)
        self.up = nn.ConvTranspose2d(128, 64, 2, stride=2)
        self.c = Block(64, 64)  # <- feature-mismatch
        self.out = nn.Conv2d(64, 1, 1)

    def forward(self, x):
        a = self.a(x)
        b = self.b(self.pool(a))
        c = self.c(torch.cat([self.up(b), a], dim=1))
        return self.out(c)


net = UNet()
criterion = nn.MSELoss()
opt = torch.optim.Adam(net.parameters())
for i in range(100):
    image = torch.rand(2, 3, 64, 64)
    loss = criterion(net(image), image.mean(1, keepdim=True))
    opt.zero_grad()
    loss.backward()
    opt.step()
