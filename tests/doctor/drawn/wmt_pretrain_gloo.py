import math
import os
import sys

import numpy as np
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

PAD, MASK, VOCAB, LEN = 0, 1, 32000, 256


class Lines(Dataset):
    def __init__(self, path):
        self.ids = np.memmap(path, dtype=np.uint16, mode="r").reshape(-1, LEN)

    def __len__(self):
        return self.ids.shape[0]

    def __getitem__(self, i):
        return torch.from_numpy(self.ids[i].astype(np.int64))


class Encoder(nn.Module):
    def __init__(self, d=512, heads=8, depth=6):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, d, padding_idx=PAD)
        self.pos = nn.Parameter(torch.zeros(1, LEN, d))
        layer = nn.TransformerEncoderLayer(d, heads, 4 * d, batch_first=True, norm_first=True)
        self.enc = nn.TransformerEncoder(layer, depth)
        self.out = nn.Linear(d, VOCAB)

    def forward(self, x):
        h = self.tok(x) + self.pos
        return self.out(self.enc(h, src_key_padding_mask=x.eq(PAD)))


def run(rank, world, path):
    dist.init_process_group(backend="gloo", rank=rank, world_size=world)  # wrong: gloo copies each gradient over the host
    torch.cuda.set_device(rank)
    net = Encoder().cuda(rank)
    net = nn.parallel.DistributedDataParallel(net, device_ids=[rank])
    data = Lines(path)
    sampler = DistributedSampler(data, num_replicas=world, rank=rank, shuffle=True)
    loader = DataLoader(data, batch_size=32, sampler=sampler, num_workers=4, pin_memory=True)
    opt = optim.Adam(net.parameters(), lr=1e-4, betas=(0.9, 0.98))
    ce = nn.CrossEntropyLoss()
    for epoch in range(10):
        sampler.set_epoch(epoch)
        for it, ids in enumerate(loader):
            ids = ids.cuda(rank, non_blocking=True)
            hide = (torch.rand(ids.shape, device=ids.device) < 0.15) & ids.ne(PAD)
            logits = net(ids.masked_fill(hide, MASK))
            loss = ce(logits[hide], ids[hide])  # wrong: a boolean mask as index: the host waits for the number of hits
            if torch.isnan(loss):  # wrong: asked, and waited for, in every batch
                sys.exit("loss is nan")
            opt.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            opt.step()
            if rank == 0 and it % 100 == 0:
                print(epoch, it, "ppl", math.exp(loss.item()))
    if rank == 0:
        torch.save(net.module.state_dict(), "mlm.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    run(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), sys.argv[1])
