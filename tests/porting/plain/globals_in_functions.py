"""train(epoch) and test(epoch) use global model and loaders; the best model is saved."""

import os

import torch
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

device = "cuda" if torch.cuda.is_available() else "cpu"
best_acc = 0
start_epoch = 0

torch.manual_seed(4)
inputs = torch.randn(64, 8)
trainset = TensorDataset(inputs, inputs[:, :3].argmax(dim=1))
trainloader = DataLoader(trainset, batch_size=16, shuffle=True)
testloader = DataLoader(trainset, batch_size=32, shuffle=False)

net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
net = net.to(device)
criterion = nn.CrossEntropyLoss()
optimizer = optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
scheduler = optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)


def train(epoch):
    net.train()
    train_loss = 0
    for batch_idx, (inputs, targets) in enumerate(trainloader):
        inputs, targets = inputs.to(device), targets.to(device)
        optimizer.zero_grad()
        outputs = net(inputs)
        loss = criterion(outputs, targets)
        loss.backward()
        optimizer.step()
        train_loss += loss.item()
        if batch_idx + 1 == len(trainloader):
            print(f"epoch {epoch} loss {train_loss / (batch_idx + 1):.4f}")


def test(epoch):
    global best_acc
    net.eval()
    correct = 0
    total = 0
    with torch.no_grad():
        for inputs, targets in testloader:
            predicted = net(inputs.to(device)).argmax(dim=1)
            total += targets.size(0)
            correct += (predicted == targets.to(device)).sum().item()
    acc = 100.0 * correct / total
    if acc > best_acc:
        state = {"net": net.state_dict(), "acc": acc, "epoch": epoch}
        if not os.path.isdir("checkpoint"):
            os.mkdir("checkpoint")
        torch.save(state, "./checkpoint/ckpt.pth")
        best_acc = acc


for epoch in range(start_epoch, start_epoch + 4):
    train(epoch)
    test(epoch)
    scheduler.step()
torch.save(net.state_dict(), "end.pt")
