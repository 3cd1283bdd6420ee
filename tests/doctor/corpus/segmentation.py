import torch
import torch.nn as nn
from torch.utils.data import DataLoader

from data import CityScenes  # our own package


class UNetSmall(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.up = nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(32, 1, 3, padding=1))

    def forward(self, x):
        return torch.sigmoid(self.up(self.down(x)))


device = torch.device("cuda")
model = UNetSmall().to(device)
criterion = nn.BCEWithLogitsLoss()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
loader = DataLoader(CityScenes("train"), batch_size=8, shuffle=True, pin_memory=True)
val_loader = DataLoader(CityScenes("val"), batch_size=8)

for epoch in range(100):
    model.train()
    for images, masks in loader:
        images = images.to(device, non_blocking=True)
        masks = masks.to(device, non_blocking=True)
        out = model(images)
        loss = criterion(out, masks)  # <- sigmoid-into-logits-loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.cuda.empty_cache()  # <- cache-emptied-each-turn
        print("loss", loss)  # <- print-in-loop
    model.eval()
    with torch.no_grad():
        for images, masks in val_loader:
            out = model(images.to(device))
