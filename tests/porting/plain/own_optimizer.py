"""A network that holds its optimizer, and what it collects for a step, as small RL scripts do."""

import torch
from torch import nn


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.data = []
        self.fc = nn.Linear(4, 2)
        self.optimizer = torch.optim.Adam(self.parameters(), lr=0.05)

    def forward(self, x):
        return self.fc(x).softmax(dim=0)

    def put_data(self, item):
        self.data.append(item)

    def train_net(self):
        total = 0
        self.optimizer.zero_grad()
        for reward, prob in self.data[::-1]:
            total = reward + 0.98 * total
            loss = -torch.log(prob) * total
            loss.backward()
        self.optimizer.step()
        self.data = []


def main():
    torch.manual_seed(5)
    observed = torch.randn(6, 4)
    pi = Policy()
    score = 0.0
    for n_epi in range(12):
        for x in observed:
            prob = pi(x)
            action = int(prob.argmax())
            reward = 1.0 if action == int(x[0] > 0) else -1.0
            pi.put_data((reward, prob[action]))
            score += reward
        pi.train_net()
        if n_epi % 4 == 3:
            print(f"episode {n_epi}, score {score:.2f}")
    torch.save(pi.state_dict(), "end.pt")


main()
