import glob

import cv2
import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset, random_split


class Lungs(Dataset):
    def __init__(self, folder):
        self.images = sorted(glob.glob(folder + "/images/*.png"))
        self.masks = sorted(glob.glob(folder + "/masks/*.png"))

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        image = cv2.resize(cv2.imread(self.images[i], 0), (256, 256)) / 255.0
        mask = cv2.resize(cv2.imread(self.masks[i], 0), (256, 256)) > 127
        x = torch.tensor(image, dtype=torch.float32).unsqueeze(0).cuda()  # wrong: moved to the card in the loading processes
        y = torch.tensor(mask, dtype=torch.float32).unsqueeze(0).cuda()
        return x, y


def block(i, o):
    return nn.Sequential(
        nn.Conv2d(i, o, 3, padding=1, bias=False),
        nn.BatchNorm2d(o),
        nn.ReLU(inplace=True),
        nn.Conv2d(o, o, 3, padding=1, bias=False),
        nn.BatchNorm2d(o),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    def __init__(self, widths=(32, 64, 128, 256)):
        super().__init__()
        self.pool = nn.MaxPool2d(2)
        self.up = nn.Upsample(scale_factor=2)
        self.down = []
        last = 1
        for w in widths:
            self.down.append(block(last, w))  # wrong: layers in a plain list: they are not parameters of the model
            last = w
        self.left = nn.ModuleList(block(a + b, a) for a, b in zip(widths[:-1], widths[1:]))
        self.out = nn.Conv2d(widths[0], 1, 1)

    def forward(self, x):
        kept = []
        for i, layer in enumerate(self.down):
            x = layer(x)
            if i < len(self.down) - 1:
                kept.append(x)
                x = self.pool(x)
        for layer, skip in zip(reversed(self.left), reversed(kept)):
            x = layer(torch.cat([skip, self.up(x)], 1))
        return torch.sigmoid(self.out(x))


def dice(pred, target):
    pred = (pred > 0.5).float()
    return 1 - 2 * (pred * target).sum() / (pred.sum() + target.sum() + 1e-6)


whole = Lungs("lungs")
train, val = random_split(whole, [int(0.9 * len(whole)), len(whole) - int(0.9 * len(whole))])
train_loader = DataLoader(train, batch_size=8, shuffle=True, num_workers=4)
val_loader = DataLoader(val, batch_size=8, num_workers=4)

net = UNet().cuda()
bce = nn.BCEWithLogitsLoss()
opt = torch.optim.Adam(net.parameters(), 1e-3)

for epoch in range(50):
    net.train()
    for x, y in train_loader:
        p = net(x)
        loss = bce(p, y) + dice(p, y)  # wrong: a sigmoid into BCEWithLogitsLoss; the dice term has a threshold and no gradient
        opt.zero_grad()
        loss.backward()
        opt.step()
        torch.cuda.empty_cache()  # wrong: the cache is emptied at each step
    net.eval()
    scores = []
    with torch.no_grad():
        for x, y in val_loader:
            scores.append(1 - dice(net(x), y).item())
    print(epoch, np.mean(scores))
