"""No loader: batches are drawn at random for a number of iterations."""

import os

import torch
from torch import nn
from torch.distributed import init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP

ddp = int(os.environ.get("RANK", -1)) != -1
device = "cpu"
if ddp:
    init_process_group(backend="nccl")
    device = f"cuda:{int(os.environ['LOCAL_RANK'])}"

data = torch.randn(1000)


def get_batch():
    starts = torch.randint(len(data) - 8, (4,))
    x = torch.stack([data[i : i + 8] for i in starts])
    return x.to(device), x.sum(dim=1, keepdim=True).to(device)


model = nn.Linear(8, 1).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
if ddp:
    model = DDP(model)
iter_num = 0
while iter_num < 20:
    x, y = get_batch()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    iter_num += 1
