"""Endless episodes of a model at module level, in a function that ends when it is good enough."""

from itertools import count

import torch
from torch import nn

torch.manual_seed(8)
policy = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
optimizer = torch.optim.Adam(policy.parameters(), lr=0.05)
losses = []


def play():
    state = torch.randn(5, 4)
    losses.append(nn.functional.cross_entropy(policy(state), (state.sum(dim=1) > 0).long()))


def finish_episode():
    optimizer.zero_grad()
    assert len(losses) == 2
    loss = torch.stack(losses).mean()
    loss.backward()
    optimizer.step()
    del losses[:]
    return loss.item()


def main():
    """Train until the running loss is small."""
    running = 1.0
    for episode in count(1):
        for _ in range(2):
            play()
        running = 0.5 * finish_episode() + 0.5 * running
        if episode % 5 == 0:
            print(f"{episode}: {running:.4f}")
        if running < 0.3:
            print(f"solved in {episode}")
            break


main()
torch.save(policy.state_dict(), "end.pt")
