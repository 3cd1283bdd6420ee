"""A small GPT on characters, after nanoGPT, with accumulated gradients."""

import math
from contextlib import nullcontext

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

BLOCK, BATCH, ACCUMULATE = 256, 32, 4
WIDTH, HEADS, LAYERS = 384, 6, 6
MAX_STEPS, WARMUP, LR, MIN_LR = 5000, 100, 1e-3, 1e-4

device = "cuda" if torch.cuda.is_available() else "cpu"
ctx = torch.autocast("cuda", dtype=torch.bfloat16) if device == "cuda" else nullcontext()
text = open("shakespeare.txt").read()
chars = sorted(set(text))
ids = np.array([chars.index(c) for c in text], dtype=np.int64)
train_ids, val_ids = ids[: int(0.9 * len(ids))], ids[int(0.9 * len(ids)) :]


def get_batch(source):
    at = torch.randint(len(source) - BLOCK - 1, (BATCH,))
    x = torch.stack([torch.from_numpy(source[i : i + BLOCK]) for i in at])
    y = torch.stack([torch.from_numpy(source[i + 1 : i + 1 + BLOCK]) for i in at])
    return x.to(device), y.to(device)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.2))

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (t.view(B, T, HEADS, C // HEADS).transpose(1, 2) for t in self.qkv(self.ln1(x)).split(C, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.2 if self.training else 0.0)
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, C))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(len(chars), WIDTH)
        self.position = nn.Embedding(BLOCK, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, len(chars), bias=False)

    def forward(self, x, y):
        h = self.token(x) + self.position(torch.arange(x.shape[1], device=x.device))
        logits = self.head(self.norm(self.blocks(h)))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), y.view(-1))


def lr_at(step):
    if step < WARMUP:
        return LR * (step + 1) / WARMUP
    return MIN_LR + 0.5 * (LR - MIN_LR) * (1 + math.cos(math.pi * (step - WARMUP) / (MAX_STEPS - WARMUP)))


@torch.no_grad()
def estimate(model):
    model.eval()
    losses = {name: torch.stack([model(*get_batch(source)) for _ in range(50)]).mean().item() for name, source in (("train", train_ids), ("val", val_ids))}
    model.train()
    return losses


model = GPT().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.99), weight_decay=0.1)
for step in range(MAX_STEPS):
    for group in optimizer.param_groups:
        group["lr"] = lr_at(step)
    if step % 250 == 0:
        print(step, estimate(model))
    for _ in range(ACCUMULATE):
        x, y = get_batch(train_ids)
        with ctx:
            loss = model(x, y) / ACCUMULATE
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
