"""Batches come from a function for each number; a scheduler steps after each of them."""

import torch
from torch import nn

steps = 10
torch.manual_seed(8)
policy = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)


def play():
    state = torch.randn(5, 4)
    return state, (state.sum(dim=1) > 0).long()


for i in range(1, steps + 1):
    state, goal = play()
    loss = nn.functional.cross_entropy(policy(state), goal)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    if i % 5 == 0:
        print(f"{i}: {loss.item():.4f}")
torch.save(policy.state_dict(), "end.pt")
