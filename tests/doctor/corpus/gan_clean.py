import torch
from torch import nn
from torchvision import datasets, transforms

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
G = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 784), nn.Tanh()).to(device)
D = nn.Sequential(nn.Linear(784, 256), nn.LeakyReLU(0.2), nn.Linear(256, 1)).to(device)
bce = nn.BCEWithLogitsLoss()
g_opt = torch.optim.Adam(G.parameters(), 2e-4)
d_opt = torch.optim.Adam(D.parameters(), 2e-4)
mnist = datasets.MNIST("data", transform=transforms.ToTensor())
loader = torch.utils.data.DataLoader(mnist, batch_size=128, shuffle=True, drop_last=True)

for epoch in range(50):
    for i, (real, _) in enumerate(loader):
        real = real.view(128, -1).to(device)
        ones = torch.ones(128, 1, device=device)
        zeros = torch.zeros(128, 1, device=device)
        fake = G(torch.randn(128, 64, device=device))
        d_loss = bce(D(real), ones) + bce(D(fake.detach()), zeros)
        d_opt.zero_grad()
        d_loss.backward()
        d_opt.step()
        g_loss = bce(D(fake), ones)
        g_opt.zero_grad()
        g_loss.backward()
        g_opt.step()
        if i % 200 == 0:
            print(f"{epoch} {i} {d_loss.item():.3f} {g_loss.item():.3f}")
