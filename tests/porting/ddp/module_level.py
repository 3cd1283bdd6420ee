"""Everything at the top of a file, for torchrun, on CPUs or GPUs."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group(backend="nccl" if torch.cuda.is_available() else "gloo")
rank = dist.get_rank()
world_size = dist.get_world_size()
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device(f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu")

inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
dataset = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank)
loader = DataLoader(dataset, batch_size=4, sampler=sampler)

torch.manual_seed(2)
net = nn.Linear(8, 1).to(device)
ddp_net = DistributedDataParallel(net)
criterion = nn.MSELoss()
opt = torch.optim.Adam(ddp_net.parameters(), lr=0.1)

for epoch in range(6):
    sampler.set_epoch(epoch)
    running = 0.0
    for batch in loader:
        x, y = (one.to(device) for one in batch)
        opt.zero_grad(set_to_none=True)
        loss = criterion(ddp_net(x), y)
        loss.backward()
        opt.step()
        running += loss.item()
    if rank == 0:
        print(f"epoch {epoch} loss {running / len(loader):.4f} of {world_size}")

if dist.get_rank() == 0:
    torch.save(ddp_net.module.state_dict(), "model.pt")
dist.barrier()
dist.destroy_process_group()
