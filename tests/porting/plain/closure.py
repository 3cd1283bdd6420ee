"""LBFGS with a closure over all data in each step, as often used for sequences."""

import torch
from torch import nn

torch.manual_seed(6)
inputs = torch.randn(40, 8).double()
targets = inputs[:, :2].sin()
model = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 2)).double()
criterion = nn.MSELoss()
# use LBFGS as optimizer since we can load the whole data to train
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.8)
for i in range(4):
    print("STEP: ", i)

    def closure():
        optimizer.zero_grad()
        out = model(inputs)
        loss = criterion(out, targets)
        print("loss:", loss.item())
        loss.backward()
        return loss

    optimizer.step(closure)
torch.save(model.state_dict(), "end.pt")
