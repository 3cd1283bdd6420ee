"""Two optimizers in each iteration of a counting loop; the learning rate follows its number."""

import torch
from torch import nn

torch.manual_seed(3)
inputs, targets = torch.randn(16, 4), torch.randn(16, 2)
first, second = nn.Linear(4, 2), nn.Linear(2, 2)
opt_first = torch.optim.SGD(first.parameters(), lr=0.1)
opt_second = torch.optim.SGD(second.parameters(), lr=0.1, momentum=0.5)

for turn in range(1, 13):
    for group in opt_second.param_groups:
        group["lr"] = 0.1 / turn
    opt_first.zero_grad()
    (first(inputs) - targets).square().mean().backward()
    opt_first.step()

    opt_second.zero_grad()
    loss = (second(first(inputs).detach()) - targets).square().mean()
    loss.backward()
    opt_second.step()
    if turn % 3 == 0:
        print(turn, loss.item())
torch.save({**first.state_dict(), "second": second.weight.detach()}, "end.pt")
