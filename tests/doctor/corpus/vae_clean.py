import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchvision import datasets, transforms


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(784, 400)
        self.mean = nn.Linear(400, 20)
        self.logvar = nn.Linear(400, 20)
        self.fc3 = nn.Linear(20, 400)
        self.fc4 = nn.Linear(400, 784)

    def encode(self, x):
        h = F.relu(self.fc1(x))
        return self.mean(h), self.logvar(h)

    def forward(self, x):
        mean, logvar = self.encode(x.view(-1, 784))
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * logvar)
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mean, logvar


def loss_of(out, x, mean, logvar):
    bce = F.binary_cross_entropy(out, x.view(-1, 784), reduction="sum")
    return bce - 0.5 * torch.sum(1 + logvar - mean.pow(2) - logvar.exp())


model = VAE()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
loader = DataLoader(datasets.MNIST("d", transform=transforms.ToTensor()), 128, shuffle=True)
for epoch in range(10):
    model.train()
    total = 0
    for x, _ in loader:
        optimizer.zero_grad()
        loss = loss_of(*[*model(x)][:1], x, *[*model(x)][1:])
        loss.backward()
        total += loss.item()
        optimizer.step()
    print(epoch, total / len(loader.dataset))
