import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class GraphBatch:
    def __init__(self, rows):
        self.nodes = torch.cat([r[0] for r in rows])
        self.target = torch.stack([r[1] for r in rows])


def collate(rows):
    return GraphBatch(rows)


class Graphs(Dataset):
    def __init__(self, path):
        self.items = torch.load(path)

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):  # <- device-in-workers
        nodes, target = self.items[i]
        return nodes.to("cuda"), target


loader = DataLoader(Graphs("graphs.pt"), 32, shuffle=True, num_workers=4, collate_fn=collate, pin_memory=True)  # <- unpinned-custom-batch
val = DataLoader(Graphs("val.pt"), 32, persistent_workers=True, collate_fn=collate)  # <- options-of-no-workers
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)).cuda()
optimizer = torch.optim.Adam(model.parameters())
for epoch in range(5):
    for batch in loader:
        out = model(batch.nodes).mean(0)
        loss = (out - batch.target.cuda()).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
