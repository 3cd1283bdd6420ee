"""The loop of an epoch runs over an index that selects batches in an order of its own."""

import torch
from torch import nn

torch.manual_seed(9)
inputs = torch.randn(44, 6)
targets = inputs[:, :3].argmax(dim=1)
model = nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
for epoch in range(3):
    for group in optimizer.param_groups:
        group["lr"] = 0.2 / (epoch + 1)
    order = torch.randperm(len(inputs))
    for start in range(0, len(inputs), 4):
        rows = order[start : start + 4]
        loss = nn.functional.cross_entropy(model(inputs[rows]), targets[rows])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
torch.save(model.state_dict(), "end.pt")
