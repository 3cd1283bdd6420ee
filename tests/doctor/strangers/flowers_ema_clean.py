"""Fine-tunes a ConvNeXt on Flowers-102 with mixed precision and an average of the weights."""

import copy
import math
import os

import torch
from torch import nn
from torch.utils.data import DataLoader
from torchvision import datasets, models, transforms

EPOCHS, WARMUP, BATCH = 40, 500, 64
torch.manual_seed(0)
device = torch.device("cuda")

normalize = transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
train_tf = transforms.Compose([transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(), transforms.ToTensor(), normalize])
test_tf = transforms.Compose([transforms.Resize(256), transforms.CenterCrop(224), transforms.ToTensor(), normalize])
train_set = datasets.Flowers102("data", "train", transform=train_tf, download=True)
val_set = datasets.Flowers102("data", "val", transform=test_tf, download=True)
workers = min(8, os.cpu_count() or 1)
train_loader = DataLoader(train_set, BATCH, shuffle=True, num_workers=workers, pin_memory=True, drop_last=True, persistent_workers=True)
val_loader = DataLoader(val_set, 2 * BATCH, num_workers=workers, pin_memory=True, persistent_workers=True)

model = models.convnext_tiny(weights=models.ConvNeXt_Tiny_Weights.DEFAULT)
model.classifier[2] = nn.Linear(model.classifier[2].in_features, 102)
model.to(device)
average = copy.deepcopy(model).eval().requires_grad_(False)

decay = [p for p in model.parameters() if p.ndim > 1]
plain = [p for p in model.parameters() if p.ndim <= 1]
optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}], lr=1e-4)
total_steps = EPOCHS * len(train_loader)


def factor(step):
    if step < WARMUP:
        return step / WARMUP
    return 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / max(1, total_steps - WARMUP)))


scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
scaler = torch.amp.GradScaler("cuda")
criterion = nn.CrossEntropyLoss(label_smoothing=0.1)


@torch.no_grad()
def update_average(rate=0.999):
    for kept, new in zip(average.parameters(), model.parameters()):
        kept.lerp_(new, 1 - rate)
    for kept, new in zip(average.buffers(), model.buffers()):
        kept.copy_(new)


@torch.inference_mode()
def evaluate(net):
    net.eval()
    hits = 0
    for x, y in val_loader:
        logits = net(x.to(device, non_blocking=True))
        hits += (logits.argmax(1) == y.to(device, non_blocking=True)).sum()
    return hits.item() / len(val_set)


for epoch in range(EPOCHS):
    model.train()
    for x, y in train_loader:
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = criterion(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        update_average()
    print(epoch, evaluate(model), evaluate(average))

torch.save(average.state_dict(), "flowers.pt")
