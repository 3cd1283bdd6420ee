import os
import time

os.environ["CUDA_LAUNCH_BLOCKING"] = "1"  # <- debugging-left-on
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchvision.datasets import CIFAR10
from torchvision.transforms import ToTensor

torch.autograd.set_detect_anomaly(True)  # <- anomaly-detection
device = torch.device("cuda")
net = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
net = nn.DataParallel(net).to(device)  # <- data-parallel
opt = torch.optim.SGD(net.parameters(), 0.1)
loader = DataLoader(CIFAR10("d", transform=ToTensor()), 64, shuffle=True)
for epoch in range(3):
    begin = time.time()
    for x, y in loader:
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)  # <- non-blocking-unpinned
        noise = torch.randn(x.shape).to(device)  # <- made-then-moved
        loss = nn.functional.cross_entropy(net.forward(x + 0.1 * noise), y)  # <- forward-by-name
        opt.zero_grad()
        loss.backward()
        opt.step()
        if torch.isnan(loss):  # <- branch-on-tensor
            break
        torch.save(net.state_dict(), "net.pt")  # <- saved-each-turn
    print(time.time() - begin)
