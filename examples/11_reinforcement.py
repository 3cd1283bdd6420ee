"""A policy that learns to balance a pole (REINFORCE): no loader; a batch is a set of episodes.

python examples/11_reinforcement.py                                       one worker
paceline launch --workers 2 examples/11_reinforcement.py
paceline launch --workers 4 --protocol k-batch-async:4 examples/11_reinforcement.py

A worker plays episodes for each number that it is granted, with its current policy; the returns are
normalised over these episodes. The next free worker gets the next number. Only the main worker's
output is shown, so the lines of the others are in runs/latest/logs. Cart and pole are those of
Barto, Sutton and Anderson, "Neuronlike adaptive elements", 1983; the method is Williams, "Simple
statistical gradient-following algorithms", 1992.
"""

import argparse

import torch
from torch import Tensor, nn

import paceline

parser = argparse.ArgumentParser()
parser.add_argument("--updates", type=int, default=60)
arguments = parser.parse_args()
EPISODES, MAX_STEPS, DISCOUNT = 32, 200, 0.99
STEP_S, GRAVITY, PUSH = 0.02, 9.8, 10.0
MASS, POLE_MASS, HALF_POLE = 1.1, 0.1, 0.5  # kg of both, kg, m
FARTHEST, STEEPEST = 2.4, 0.2095  # m, rad


def next_state(state: Tensor, right: Tensor) -> Tensor:
    """Return carts (B, 4: position, speed, angle, spin) a step later; right: 1, or 0 for left."""
    _, speed, angle, spin = state.unbind(1)
    sin, cos = angle.sin(), angle.cos()
    drive = (PUSH * (2 * right - 1) + POLE_MASS * HALF_POLE * spin**2 * sin) / MASS
    torque = GRAVITY * sin - cos * drive
    angular_acceleration = torque / (HALF_POLE * (4 / 3 - POLE_MASS * cos**2 / MASS))
    acceleration = drive - POLE_MASS * HALF_POLE * angular_acceleration * cos / MASS
    return state + STEP_S * torch.stack([speed, acceleration, spin, angular_acceleration], dim=1)


def play(policy: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    """Return states (T, B, 4), pushes (T, B), and whether each pole still stood (T, B)."""
    state = 0.1 * torch.rand(EPISODES, 4) - 0.05
    stands = torch.ones(EPISODES)
    steps = []
    while stands.any() and len(steps) < MAX_STEPS:
        with torch.no_grad():
            right = torch.bernoulli(policy(state).squeeze(1).sigmoid())
        steps.append((state, right, stands))
        state = next_state(state, right)
        is_up = (state[:, 0].abs() < FARTHEST) & (state[:, 2].abs() < STEEPEST)
        stands = stands * is_up
    states, pushes, standing = zip(*steps, strict=True)
    return torch.stack(states), torch.stack(pushes), torch.stack(standing)


def advantages(stood: Tensor) -> Tensor:
    """Return discounted returns (T, B), normalised over all steps at which a pole stood."""
    total, returns = torch.zeros(EPISODES), []
    for reward in reversed(stood.unbind(0)):
        total = reward + DISCOUNT * total
        returns.append(total)
    all_returns = torch.stack(returns[::-1])
    valid = all_returns[stood > 0]
    return stood * (all_returns - valid.mean()) / (valid.std() + 1e-6)


torch.manual_seed(0)
pace = paceline.connect()
policy = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(policy.parameters(), lr=2e-2)
policy, optimizer = pace.prepare(policy, optimizer)

for number in pace.updates(arguments.updates):
    with pace.step():
        states, pushes, stood = play(policy)
        scores = policy(states).squeeze(2)
        surprise = nn.functional.binary_cross_entropy_with_logits(scores, pushes, reduction="none")
        loss = (surprise * advantages(stood)).sum() / stood.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if number % 20 == 0:
        print(f"version {pace.version}: a pole stood for {stood.sum() / EPISODES:.0f} steps")

_, _, stood = play(policy)
pace.print(f"at the end a pole stands for {stood.sum() / EPISODES:.0f} of {MAX_STEPS} steps")
