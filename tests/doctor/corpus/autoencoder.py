import torch
from torch import nn
from torch.utils.data import DataLoader
from torchvision import datasets, transforms


class AutoEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc1 = nn.Linear(784, 256)
        self.enc2 = nn.Linear(256, 32)
        self.dec1 = nn.Linear(32, 256)
        self.dec2 = nn.Linear(128, 784)  # <- feature-mismatch

    def forward(self, x):
        x = torch.relu(self.enc1(x))
        x = torch.relu(self.enc2(x))
        x = torch.relu(self.dec1(x))
        return self.dec2(x)


device = torch.device("gpu")  # <- device-gpu
model = AutoEncoder().to(device)
data = datasets.FashionMNIST("data", transform=transforms.ToTensor())
loader = DataLoader(data, batch_size=256, shuffle=True)
optimizer = torch.optim.Adam(model.parameters())
for epoch in range(10):
    for images, _ in loader:
        images.to(device)  # <- copy-dropped
        flat = images.view(images.size(0), -1)
        loss = nn.functional.mse_loss(model(flat), flat)
        loss.backward()
        optimizer.zero_grad()  # <- zero-grad-before-step
        optimizer.step()
