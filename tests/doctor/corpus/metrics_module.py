import numpy as np
import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset


def accuracy(outputs, labels):
    predicted = outputs.argmax(dim=1).cpu().numpy()  # <- numpy-in-loop
    return (predicted == labels.cpu().numpy()).mean()


def step(model, batch, optimizer, criterion, device):
    x, y = (one.to(device) for one in batch)
    out = model(x)
    loss = criterion(out, y)
    loss.backward()
    optimizer.step()  # <- zero-grad-missing
    return loss.item(), accuracy(out, y)  # <- item-in-loop


device = torch.device("cuda")
X = torch.from_numpy(np.load("x.npy")).float()
Y = torch.from_numpy(np.load("y.npy")).long()
loader = DataLoader(TensorDataset(X, Y), 64, shuffle=True, pin_memory=True)
model = nn.Sequential(nn.Linear(40, 80), nn.ReLU(), nn.Linear(80, 4)).to(device)
criterion = nn.CrossEntropyLoss()
optimizer = optim.Adam(model.parameters())
for epoch in range(20):
    results = [step(model, batch, optimizer, criterion, device) for batch in loader]
    print(np.mean(results, axis=0))
