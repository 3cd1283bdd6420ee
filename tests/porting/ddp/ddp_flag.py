"""``ddp`` is set from the environment; accumulated gradients; a GradScaler."""

import os

import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

accumulation_steps = 2
ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    init_process_group(backend="nccl")
    ddp_rank = int(os.environ["RANK"])
    device = f"cuda:{int(os.environ['LOCAL_RANK'])}"
    torch.cuda.set_device(device)
    master_process = ddp_rank == 0
    seed_offset = ddp_rank
else:
    master_process = True
    seed_offset = 0
    device = "cpu"

torch.manual_seed(2 + seed_offset)
inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
train_loader = DataLoader(
    TensorDataset(inputs, inputs[:, :3].argmax(dim=1)), batch_size=4, shuffle=True
)
model = nn.Linear(8, 3).to(device)
scaler = torch.amp.GradScaler("cuda", enabled=device.startswith("cuda"))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
if ddp:
    model = DDP(model, device_ids=[device])
raw_model = model.module if ddp else model

for epoch in range(6):
    for step, (x, y) in enumerate(train_loader):
        loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device)) / accumulation_steps
        scaler.scale(loss).backward()
        if (step + 1) % accumulation_steps == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
    if master_process:
        print(f"epoch {epoch} loss {loss.item() * accumulation_steps:.4f}")

if ddp:
    destroy_process_group()
