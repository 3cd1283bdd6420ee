import copy

import torch
from torch import autograd, nn, optim
from torch.utils.data import DataLoader
from torchvision import datasets, transforms
from torchvision.utils import save_image

nz, ngf, ndf, lam, n_critic = 100, 64, 64, 10.0, 5
dev = torch.device("cuda")


def up(i, o):
    return nn.Sequential(nn.ConvTranspose2d(i, o, 4, 2, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU(True))


def down(i, o):
    return nn.Sequential(nn.Conv2d(i, o, 4, 2, 1), nn.GroupNorm(8, o), nn.LeakyReLU(0.2, True))


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.ConvTranspose2d(nz, ngf * 8, 4, 1, 0, bias=False), nn.BatchNorm2d(ngf * 8), nn.ReLU(True))
        self.mid = nn.Sequential(up(ngf * 8, ngf * 4), up(ngf * 4, ngf * 2), up(ngf * 2, ngf))
        self.last = nn.ConvTranspose2d(ngf, 3, 4, 2, 1)

    def forward(self, z):
        return torch.tanh(self.last(self.mid(self.first(z))))


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(down(3, ndf), down(ndf, ndf * 2), down(ndf * 2, ndf * 4), down(ndf * 4, ndf * 8))
        self.head = nn.Conv2d(ndf * 8, 1, 4)

    def forward(self, x):
        return self.head(self.body(x)).flatten()


def gradient_penalty(critic, real, fake):
    alpha = torch.rand(real.shape[0], 1, 1, 1, device=real.device)
    inter = alpha * real + (1 - alpha) * fake
    inter.requires_grad_(True)
    scores = critic(inter)
    g = autograd.grad(outputs=scores, inputs=inter, grad_outputs=torch.ones_like(scores))[0]  # wrong: no create_graph: the penalty teaches nothing
    g = g.view(g.size(0), -1)
    return ((g.norm(2, dim=1) - 1) ** 2).mean()


tf = transforms.Compose([transforms.Resize(64), transforms.CenterCrop(64), transforms.ToTensor(), transforms.Normalize((0.5,) * 3, (0.5,) * 3)])
dl = DataLoader(datasets.ImageFolder("anime", tf), batch_size=64, shuffle=True, num_workers=8, pin_memory=True, drop_last=True)

netG, netC = Generator().to(dev), Critic().to(dev)
ema = copy.deepcopy(netG).eval().requires_grad_(False)
optG = optim.Adam(netG.parameters(), lr=1e-4, betas=(0.0, 0.9))
optC = optim.Adam(netC.parameters(), lr=1e-4, betas=(0.0, 0.9))
fixed = torch.randn(64, nz, 1, 1).to(dev)

it = 0
for epoch in range(200):
    for real, _ in dl:
        real = real.to(dev, non_blocking=True)
        z = torch.randn(real.size(0), nz, 1, 1).to(dev)  # wrong: made on the host and copied, in every batch
        with torch.no_grad():
            fake = netG(z)
        lossC = netC(fake).mean() - netC(real).mean() + lam * gradient_penalty(netC, real, fake)
        optC.zero_grad(set_to_none=True)
        lossC.backward()
        optC.step()
        if it % n_critic == 0:
            lossG = -netC(netG(z)).mean()
            optG.zero_grad(set_to_none=True)
            lossG.backward()
            optG.step()
            with torch.no_grad():
                for a, b in zip(ema.parameters(), netG.parameters()):  # wrong: an operation for each parameter, where torch._foreach_lerp_ is one
                    a.mul_(0.999).add_(b, alpha=0.001)
                for a, b in zip(ema.buffers(), netG.buffers()):
                    a.copy_(b)
        it += 1
    with torch.no_grad():
        save_image(ema(fixed), f"out/{epoch:03d}.png", normalize=True)
