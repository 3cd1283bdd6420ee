import torch
import torchvision
from torch import nn

device = torch.device("cuda")
model = torchvision.models.resnet34(num_classes=10).to(device)
data = torchvision.datasets.CIFAR10("d", transform=torchvision.transforms.ToTensor())
loader = torch.utils.data.DataLoader(data, 32, shuffle=True, pin_memory=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for i, (x, y) in enumerate(loader):
    loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
    loss.backward()  # <- accumulation-not-divided
    if (i + 1) % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
    losses += [loss]  # <- loss-keeps-graph
    value = float(loss)  # <- item-in-loop
