"""Two models against each other, each with an optimizer of its own."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(3)
loader = DataLoader(TensorDataset(torch.randn(64, 4), torch.randn(64, 2)), batch_size=8)
generator, critic = nn.Linear(2, 4), nn.Linear(4, 1)
opt_g = torch.optim.Adam(generator.parameters(), lr=0.01)
opt_c = torch.optim.SGD(critic.parameters(), lr=0.1, momentum=0.5)
loss_of = nn.BCEWithLogitsLoss()

for _ in range(2):
    for real, noise in loader:
        made = generator(noise)
        opt_c.zero_grad()
        is_real, is_made = critic(real), critic(made.detach())
        loss_c = loss_of(is_real, torch.ones_like(is_real))
        loss_c = loss_c + loss_of(is_made, torch.zeros_like(is_made))
        loss_c.backward()
        opt_c.step()

        opt_g.zero_grad()
        fooled = critic(made)
        loss_of(fooled, torch.ones_like(fooled)).backward()
        opt_g.step()
torch.save({**generator.state_dict(), **critic.state_dict()}, "end.pt")
