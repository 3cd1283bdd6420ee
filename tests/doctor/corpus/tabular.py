import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

table = np.loadtxt("heart.csv", delimiter=",", skiprows=1)
X = torch.tensor(table[:, :-1], dtype=torch.float32)
Y = torch.tensor(table[:, -1], dtype=torch.long)
dataset = TensorDataset(X, Y)
loader = DataLoader(dataset, batch_size=1, shuffle=True)  # <- batch-norm-of-one

model = nn.Sequential(
    nn.Linear(13, 64),  # <- bias-before-norm
    nn.BatchNorm1d(64),
    nn.ReLU(),
    nn.Linear(64, 2),
    nn.Softmax(dim=1),
)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

for epoch in range(200):
    losses = []
    for xb, yb in loader:
        pred = model(xb)
        loss = criterion(pred, yb)  # <- softmax-into-cross-entropy
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(epoch, np.mean(losses))

with torch.no_grad():
    for xb, yb in loader:
        print(model(xb).argmax(1) == yb)  # <- evaluated-in-training-mode
