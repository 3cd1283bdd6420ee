"""Batches are drawn at random, one ahead; the rate is set by hand; the loop counts itself."""

import math
import os

import torch
from torch import nn

max_iters = 9
warmup_iters = 3
learning_rate = 0.1
accumulation_steps = 2
init_from = "scratch"
torch.manual_seed(1337)
data = torch.randn(400)


def get_batch(split):
    part = data[:300] if split == "train" else data[300:]
    starts = torch.randint(len(part) - 8, (6,))
    x = torch.stack([part[i : i + 8] for i in starts])
    return x, x.sum(dim=1, keepdim=True)


iter_num = 0
model = nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
if init_from == "resume":
    checkpoint = torch.load("ckpt.pt")
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    iter_num = checkpoint["iter_num"]


@torch.no_grad()
def estimate_loss():
    out = {}
    for split in ["train", "val"]:
        X, Y = get_batch(split)
        out[split] = nn.functional.mse_loss(model(X), Y).item()
    return out


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    return learning_rate * 0.5 * (1.0 + math.cos(math.pi * it / (max_iters + 1)))


X, Y = get_batch("train")  # the first one
while True:
    lr = get_lr(iter_num)
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr
    if iter_num % 4 == 0:
        losses = estimate_loss()
        print(f"step {iter_num}: train {losses['train']:.4f} val {losses['val']:.4f}")
        if iter_num > 0:
            checkpoint = {"model": model.state_dict(), "iter_num": iter_num}
            torch.save(checkpoint, os.path.join("ckpt.pt"))
    for _ in range(accumulation_steps):
        loss = nn.functional.mse_loss(model(X), Y) / accumulation_steps
        X, Y = get_batch("train")
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    iter_num += 1
    if iter_num > max_iters:
        break
torch.save(model.state_dict(), "end.pt")
