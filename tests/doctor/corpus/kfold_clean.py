import torch
from sklearn.model_selection import KFold
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

data = TensorDataset(torch.randn(1000, 20), torch.randint(0, 3, (1000,)))


def make_model():
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 3))


scores = []
for fold, (train_ids, test_ids) in enumerate(KFold(5, shuffle=True).split(range(1000))):
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters())
    loader = DataLoader(Subset(data, train_ids), batch_size=32, shuffle=True)
    test_loader = DataLoader(Subset(data, test_ids), batch_size=100)
    for epoch in range(20):
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        hits = sum((model(x).argmax(1) == y).sum().item() for x, y in test_loader)
    scores.append(hits / len(test_ids))
print(sum(scores) / len(scores))
