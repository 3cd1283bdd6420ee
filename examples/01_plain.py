"""LeNet on Fashion-MNIST, as a plain PyTorch script: python examples/01_plain.py

02_paceline.py is the same script with four lines changed (and one import):

    diff -w examples/01_plain.py examples/02_paceline.py
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader

from images import open_images

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--batch-size", type=int, default=256)
parser.add_argument("--samples", type=int, help="number of training images to use")
arguments = parser.parse_args()

torch.manual_seed(0)
device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
model = nn.Sequential(
    nn.Conv2d(1, 20, kernel_size=3), nn.ReLU(), nn.AvgPool2d(2),
    nn.Conv2d(20, 50, kernel_size=5), nn.ReLU(), nn.AvgPool2d(2),
    nn.Flatten(), nn.Linear(800, 128), nn.ReLU(), nn.Linear(128, 10),
).to(device)  # fmt: skip
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loss_fn = nn.CrossEntropyLoss()
train_images, test_images = open_images(arguments.samples)
loader = DataLoader(train_images, batch_size=arguments.batch_size, shuffle=True)

for epoch in range(arguments.epochs):
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = loss_fn(model(inputs.to(device)), targets.to(device))
        loss.backward()
        optimizer.step()
    correct = 0
    with torch.no_grad():
        for inputs, targets in DataLoader(test_images, batch_size=1000):
            correct += (model(inputs.to(device)).argmax(1) == targets.to(device)).sum().item()
    print(f"epoch {epoch + 1}: test accuracy {correct / len(test_images):.4f}")
