import torch
import torch.nn as nn
import torchvision.transforms as T
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.utils import save_image

Z, LAMBDA, CRITIC_STEPS = 128, 10, 5
device = torch.device("cuda")

faces = ImageFolder("celeba", T.Compose([T.Resize(64), T.CenterCrop(64), T.ToTensor(), T.Normalize([0.5] * 3, [0.5] * 3)]))
loader = DataLoader(faces, batch_size=64, shuffle=True, num_workers=6, pin_memory=True, drop_last=True)

G = nn.Sequential(
    nn.ConvTranspose2d(Z, 512, 4, 1, 0, bias=False), nn.BatchNorm2d(512), nn.ReLU(True),
    nn.ConvTranspose2d(512, 256, 4, 2, 1, bias=False), nn.BatchNorm2d(256), nn.ReLU(True),
    nn.ConvTranspose2d(256, 128, 4, 2, 1, bias=False), nn.BatchNorm2d(128), nn.ReLU(True),
    nn.ConvTranspose2d(128, 64, 4, 2, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU(True),
    nn.ConvTranspose2d(64, 3, 4, 2, 1), nn.Tanh(),
).to(device)
D = nn.Sequential(
    nn.Conv2d(3, 64, 4, 2, 1), nn.LeakyReLU(0.2),
    nn.Conv2d(64, 128, 4, 2, 1), nn.InstanceNorm2d(128, affine=True), nn.LeakyReLU(0.2),
    nn.Conv2d(128, 256, 4, 2, 1), nn.InstanceNorm2d(256, affine=True), nn.LeakyReLU(0.2),
    nn.Conv2d(256, 1, 8), nn.Flatten(),
).to(device)
opt_g = torch.optim.Adam(G.parameters(), 1e-4, betas=(0.0, 0.9))
opt_d = torch.optim.Adam(D.parameters(), 1e-4, betas=(0.0, 0.9))
fixed = torch.randn(64, Z, 1, 1, device=device)


def penalty(real, fake):
    eps = torch.rand(real.size(0), 1, 1, 1, device=device)
    mixed = (eps * real + (1 - eps) * fake).requires_grad_(True)
    grad = torch.autograd.grad(D(mixed).sum(), mixed)[0]  # wrong: without create_graph=True the penalty has no gradient
    return ((grad.flatten(1).norm(2, dim=1) - 1) ** 2).mean()


step = 0
for epoch in range(100):
    for real, _ in loader:
        real = real.to(device)
        z = torch.randn(real.size(0), Z, 1, 1, device=device)
        fake = G(z)
        d_loss = D(fake).mean() - D(real).mean() + LAMBDA * penalty(real, fake.detach())  # wrong: D(fake) is not detached: the critic's loss goes back through the generator
        opt_d.zero_grad()
        d_loss.backward(retain_graph=True)  # wrong: the graph is kept for nothing
        opt_d.step()

        if step % CRITIC_STEPS == 0:
            g_loss = -D(G(z)).mean()
            g_loss.backward()  # wrong: opt_g.zero_grad() is never called: the generator's gradients add up
            opt_g.step()
        step += 1
    with torch.no_grad():
        save_image(G(fixed), f"faces_{epoch}.png", normalize=True)
