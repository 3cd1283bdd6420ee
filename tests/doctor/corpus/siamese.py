import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

a, b = torch.randn(1024, 64), torch.randn(1024, 64)
same = torch.randint(0, 2, (1024,)).float()
pairs = TensorDataset(a, b, same)
device = torch.device("cuda")
tower = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32)).to(device)
opt = torch.optim.RMSprop(tower.parameters())
scores = torch.empty(0, device=device)
for epoch in range(20):
    loader = DataLoader(pairs, batch_size=64, shuffle=True, num_workers=4, pin_memory=True)  # <- loader-made-in-loop
    for left, right, label in loader:
        left, right, label = left.to(device), right.to(device), label.to(device)
        distance = (tower(left) - tower(right)).norm(dim=1)
        loss = (distance - label).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        scores = torch.cat([scores, loss.detach().view(1)])  # <- grown-by-cat
        seen = distance.detach().cpu().numpy()  # <- numpy-in-loop
