import gymnasium as gym
import torch
import torch.nn as nn
from torch.distributions import Categorical

env = gym.make("CartPole-v1")
policy = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
value = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.Adam(list(policy.parameters()) + list(policy.parameters()), lr=3e-4)  # wrong: policy twice, value never
GAMMA, CLIP, UPDATES, STEPS = 0.99, 0.2, 500, 1024


def collect():
    states, actions, logps, rewards, dones = [], [], [], [], []
    state, _ = env.reset()
    for _ in range(STEPS):
        s = torch.tensor(state, dtype=torch.float32)
        dist = Categorical(logits=policy(s))
        a = dist.sample()
        nxt, r, done, cut, _ = env.step(a.item())
        states.append(s)
        actions.append(a)
        logps.append(dist.log_prob(a))  # wrong: the old log-probabilities keep their graph; the ratio has a gradient of naught, and a second backward fails
        rewards.append(r)
        dones.append(done or cut)
        state = env.reset()[0] if done or cut else nxt
    return torch.stack(states), torch.stack(actions), torch.stack(logps), rewards, dones


for update in range(UPDATES):
    states, actions, old, rewards, dones = collect()
    returns, running = [], 0.0
    for r, d in zip(reversed(rewards), reversed(dones)):
        running = r + GAMMA * running * (1 - d)
        returns.insert(0, running)
    returns = torch.tensor(returns)
    for _ in range(4):
        v = value(states).squeeze(-1)
        advantage = returns - v  # wrong: the advantage is not detached: the policy's loss trains the value too
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        dist = Categorical(logits=policy(states))
        ratio = (dist.log_prob(actions) - old).exp()
        surrogate = torch.min(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
        loss = -surrogate.mean() + 0.5 * (returns - v).pow(2).mean() - 0.01 * dist.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
        optimizer.step()
    print(update, sum(rewards) / max(1, sum(dones)))
