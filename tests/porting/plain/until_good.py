"""``while True`` over draws, left by a return."""

import torch
from torch import nn


def train(model, optimizer):
    best = float("inf")
    while True:
        x = torch.randn(16, 4)
        loss = nn.functional.mse_loss(model(x), x.sum(dim=1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        best = min(best, loss.item())
        if best < 0.05:
            return best


torch.manual_seed(2)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
best = train(model, optimizer)
print(f"{best:.4f}")
torch.save(model.state_dict(), "end.pt")
