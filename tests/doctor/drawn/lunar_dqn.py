import random
from collections import deque, namedtuple

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

Transition = namedtuple("Transition", "s a r s2 d")


class QNet(nn.Module):
    def __init__(self, n_obs, n_act):
        super().__init__()
        self.l1 = nn.Linear(n_obs, 128)
        self.l2 = nn.Linear(128, 128)
        self.l3 = nn.Linear(128, n_act)

    def forward(self, x):
        x = F.relu(self.l1(x))
        x = F.relu(self.l2(x))
        return self.l3(x)


class Agent:
    def __init__(self, env, gamma=0.99, lr=5e-4):
        self.env = env
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.q = QNet(env.observation_space.shape[0], env.action_space.n).to(self.device)
        self.opt = torch.optim.Adam(self.q.parameters(), lr=lr)
        self.memory = deque(maxlen=100_000)
        self.gamma = gamma
        self.eps = 1.0

    def act(self, state):
        if random.random() < self.eps:
            return self.env.action_space.sample()
        with torch.no_grad():
            s = torch.as_tensor(state, dtype=torch.float32, device=self.device)
            return int(self.q.forward(s.unsqueeze(0)).argmax())  # wrong: forward() called past the module's hooks

    def learn(self, n=64):
        batch = Transition(*zip(*random.sample(self.memory, n)))
        s = torch.as_tensor(np.array(batch.s), dtype=torch.float32, device=self.device)
        a = torch.as_tensor(batch.a, device=self.device).unsqueeze(1)
        r = torch.as_tensor(batch.r, dtype=torch.float32, device=self.device)
        s2 = torch.as_tensor(np.array(batch.s2), dtype=torch.float32, device=self.device)
        d = torch.as_tensor(batch.d, dtype=torch.float32, device=self.device)
        qsa = self.q(s).gather(1, a).squeeze(1)
        target = r + self.gamma * self.q(s2).max(dim=1)[0] * (1 - d)  # wrong: the target has a gradient
        loss = F.smooth_l1_loss(qsa, target)
        if loss > 100:  # wrong: a branch on a tensor of the device in every step
            loss = loss.clamp(max=100)
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()


def main():
    env = gym.make("LunarLander-v2")
    agent = Agent(env)
    for episode in range(1500):
        state, _ = env.reset()
        total, done = 0.0, False
        while not done:
            action = agent.act(state)
            nxt, reward, term, trunc, _ = env.step(action)
            done = term or trunc
            agent.memory.append(Transition(state, action, reward, nxt, term))
            if len(agent.memory) > 1000:
                agent.learn()
            state = nxt
            total += reward
        agent.eps = max(0.02, agent.eps * 0.995)
        if episode % 20 == 0:
            print(f"{episode=} {total=:.1f} eps={agent.eps:.2f}")


if __name__ == "__main__":
    main()
