import torch
import torch.nn as nn
import torchvision
from torch.optim import lr_scheduler
from torchvision import transforms

device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
image_sets = {
    part: torchvision.datasets.ImageFolder(f"hymenoptera/{part}", transforms.ToTensor())
    for part in ("train", "val")
}
loaders = {
    part: torch.utils.data.DataLoader(image_sets[part], batch_size=4, shuffle=True)
    for part in ("train", "val")
}
model = torchvision.models.resnet18(weights="DEFAULT")
model.fc = nn.Linear(model.fc.in_features, 2)
model = model.to(device)
criterion = nn.CrossEntropyLoss()

for epoch in range(25):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)  # <- optimizer-made-in-loop
    model.train()
    for inputs, labels in loaders["train"]:
        inputs = inputs.to(device)
        labels = labels.to(device)
        optimizer.zero_grad()
        loss = criterion(model(inputs), labels)
        loss.backward()
        optimizer.step()
    model.eval()
    hits = 0
    with torch.no_grad():
        for inputs, labels in loaders["val"]:
            hits += (model(inputs.to(device)).argmax(1).cpu() == labels).sum().item()
    print(epoch, hits)
