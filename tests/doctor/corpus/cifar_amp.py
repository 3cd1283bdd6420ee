import torch
import torchvision
from torch import nn, optim
from torch.cuda.amp import GradScaler, autocast
from torchvision import transforms

EPOCHS = 30
net = torchvision.models.resnet18(num_classes=10).cuda()
criterion = nn.CrossEntropyLoss()
opt = optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
scaler = GradScaler()
train_data = torchvision.datasets.CIFAR10("data", transform=transforms.ToTensor())
loader = torch.utils.data.DataLoader(train_data, 128, shuffle=True, num_workers=4)  # <- unpinned

for epoch in range(EPOCHS):
    net.train()
    running = 0.0
    for i, (img, lab) in enumerate(loader):
        img = img.cuda()
        lab = lab.cuda()
        opt.zero_grad()
        with autocast():
            pred = net(img)
            loss = criterion(pred, lab)
            scaler.scale(loss).backward()  # <- backward-under-autocast
        nn.utils.clip_grad_norm_(net.parameters(), 5.0)  # <- clip-before-unscale
        scaler.step(opt)
        scaler.update()
        running += loss.item()  # <- item-in-loop
    print(epoch, running / len(loader))
