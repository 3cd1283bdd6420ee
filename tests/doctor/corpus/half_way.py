import torch
from torch import nn
from torch.utils.data import DataLoader
from torchvision.datasets import MNIST
from torchvision.transforms import ToTensor

loader = DataLoader(MNIST("d", transform=ToTensor()), 64, shuffle=True, pin_memory=True)
model = nn.Sequential(nn.Flatten(), nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 10))
model = model.cuda().half()  # <- trained-in-half
optimizer = torch.optim.Adam(model.parameters())
for x, y in loader:
    x, y = x.cuda().half(), y.cuda()
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
