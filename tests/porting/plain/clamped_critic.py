"""A critic whose weights are clamped after each step; the generator steps less often."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

LIMIT, EVERY = 0.05, 3


def main():
    torch.manual_seed(3)
    loader = DataLoader(
        TensorDataset(torch.randn(64, 4), torch.randn(64, 2)), batch_size=8, shuffle=True
    )
    generator, critic = nn.Linear(2, 4), nn.Linear(4, 1)
    opt_g = torch.optim.RMSprop(generator.parameters(), lr=0.01)
    opt_c = torch.optim.RMSprop(critic.parameters(), lr=0.01)
    for _ in range(3):
        for i, (real, noise) in enumerate(loader):
            opt_c.zero_grad()
            (critic(generator(noise).detach()).mean() - critic(real).mean()).backward()
            opt_c.step()

            # a Lipschitz bound
            for p in critic.parameters():
                p.data.clamp_(-LIMIT, LIMIT)
            with torch.no_grad():
                for p in critic.parameters():
                    p.mul_(0.999)

            if i % EVERY == 0:
                opt_g.zero_grad()
                (-critic(generator(noise)).mean()).backward()
                opt_g.step()
    torch.save({**generator.state_dict(), **critic.state_dict()}, "end.pt")


main()
