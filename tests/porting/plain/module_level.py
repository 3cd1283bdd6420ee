"""Everything at module level, with a scheduler step per epoch."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(3)
inputs = torch.randn(64, 8)
train_loader = DataLoader(TensorDataset(inputs, inputs[:, :3].argmax(dim=1)), 8, shuffle=True)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)

# Train
for epoch in range(3):
    for i, (images, labels) in enumerate(train_loader):
        outputs = model(images)
        loss = criterion(outputs, labels)

        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        if (i + 1) % 4 == 0:
            print(f"Epoch {epoch + 1}, step {i + 1}, loss {loss.item():.4f}")
    scheduler.step()

model.eval()
with torch.no_grad():
    right = sum((model(x).argmax(dim=1) == y).sum().item() for x, y in train_loader)
print(f"right {right}")
torch.save(model.state_dict(), "end.pt")
