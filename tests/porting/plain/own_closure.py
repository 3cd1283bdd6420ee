"""A custom optimizer that moves the weights, calls the closure again, and steps."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Sharpness(torch.optim.SGD):
    def __init__(self, params, lr, rho):
        super().__init__(params, lr=lr)
        self.rho = rho

    @torch.no_grad()
    def step(self, closure):
        with torch.enable_grad():
            closure()
        held = [p for group in self.param_groups for p in group["params"]]
        moves = [self.rho * p.grad.sign() for p in held]
        for p, move in zip(held, moves, strict=True):
            p.add_(move)
        with torch.enable_grad():
            loss = closure()
        for p, move in zip(held, moves, strict=True):
            p.sub_(move)
        super().step()
        return loss


torch.manual_seed(7)
inputs = torch.randn(48, 8)
loader = DataLoader(TensorDataset(inputs, inputs[:, :3].argmax(dim=1)), 8, shuffle=True)
model = nn.Linear(8, 3)
optimizer = Sharpness(model.parameters(), lr=0.1, rho=0.01)
for epoch in range(2):
    for x, y in loader:

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            return loss

        loss = optimizer.step(closure)
    print(f"epoch {epoch}: loss {loss.item():.4f}")
torch.save(model.state_dict(), "end.pt")
