# coding: utf-8
# In[1]:
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, random_split
from torchvision import datasets, transforms

# In[2]:
full = datasets.FashionMNIST("data", download=True, transform=transforms.ToTensor())
train_ds, val_ds = random_split(full, [50000, 10000])
train_dl = DataLoader(train_ds, batch_size=100, shuffle=True)
val_dl = DataLoader(val_ds, batch_size=100)

# In[3]:
model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Conv2d(32, 32, 3, padding=1),  # <- feature-mismatch
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Linear(1568, 10),
)
device = "cuda" if torch.cuda.is_available() else "cpu"
model.to(device)
opt = torch.optim.Adam(model.parameters())

# In[4]:
for epoch in range(5):
    for xb, yb in train_dl:
        xb, yb = xb.to(device), yb.to(device)
        loss = F.cross_entropy(model(xb), yb)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print("epoch", epoch, "loss", loss.item())  # <- item-in-loop

# In[5]:
correct = 0
for xb, yb in val_dl:
    out = model(xb.to(device))  # <- evaluated-with-gradients
    correct += (out.argmax(1).cpu() == yb).sum()
print(correct / 10000)
