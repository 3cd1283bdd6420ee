import os
import time

import torch
import torchvision
from torch import nn
from torchvision import transforms as T

# reproducibility!!!
torch.manual_seed(42)
torch.backends.cudnn.deterministic = True  # wrong: slower kernels, and nothing here asks for the same bits
torch.backends.cudnn.benchmark = False

root = os.path.expanduser("~/plants")
mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
tfm = {
    "train": T.Compose([T.RandomResizedCrop(224), T.RandomHorizontalFlip(), T.ToTensor(), T.Normalize(mean, std)]),
    "val": T.Compose([T.Resize(256), T.CenterCrop(224), T.ToTensor(), T.Normalize(mean, std)]),
}
sets = {k: torchvision.datasets.ImageFolder(os.path.join(root, k), tfm[k]) for k in ("train", "val")}
loaders = {
    k: torch.utils.data.DataLoader(sets[k], batch_size=128, shuffle=k == "train", num_workers=8, pin_memory=True)
    for k in ("train", "val")
}

model = torchvision.models.densenet121(weights="DEFAULT")
model.classifier = nn.Linear(1024, len(sets["train"].classes))
model = nn.DataParallel(model)  # wrong: one process for all cards, where DistributedDataParallel has one for each
criterion = nn.CrossEntropyLoss().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.1)

for epoch in range(25):
    t0 = time.time()
    model.cuda()  # wrong: put on the card anew in each epoch, after the optimizer was made
    for phase in ("train", "val"):
        model.train(phase == "train")
        running = torch.zeros(2, device="cuda")
        for x, y in loaders[phase]:
            x = x.cuda(non_blocking=True)
            y = y.cuda(non_blocking=True)
            optimizer.zero_grad()
            with torch.set_grad_enabled(phase == "train"):
                out = model(x)
                loss = criterion(out, y)
                if phase == "train":
                    loss.backward()
                    optimizer.step()
            running[0] += loss.detach() * len(y)
            running[1] += (out.argmax(1) == y).sum()
        if phase == "train":
            scheduler.step()
        a, b = (running / len(sets[phase])).tolist()
        print("%s %d loss %.4f acc %.4f (%.0fs)" % (phase, epoch, a, b, time.time() - t0))

torch.save(model.module.state_dict(), "plants.pth")
