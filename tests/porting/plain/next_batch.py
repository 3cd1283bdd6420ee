"""At module level: counted iterations, each with the next batch of an endless loader."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(5)
inputs = torch.randn(64, 8)
loader = DataLoader(TensorDataset(inputs, inputs[:, :3].argmax(dim=1)), 8, shuffle=True)
model = nn.Linear(8, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
batches = iter(loader)
for it in range(20):
    try:
        x, y = next(batches)
    except StopIteration:
        batches = iter(loader)
        x, y = next(batches)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    if it % 5 == 0:
        print(f"turn {it}: loss {loss.item():.4f}")
torch.save(model.state_dict(), "end.pt")
