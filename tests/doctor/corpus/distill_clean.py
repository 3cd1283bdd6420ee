import torch
import torch.nn.functional as F
import torchvision

device = torch.device("cuda")
teacher = torchvision.models.resnet50(weights="DEFAULT").to(device).eval()
student = torchvision.models.resnet18().to(device)
optimizer = torch.optim.SGD(student.parameters(), lr=0.05)
scaler = torch.amp.GradScaler("cuda")
data = torchvision.datasets.ImageFolder("train", torchvision.transforms.ToTensor())
loader = torch.utils.data.DataLoader(data, 64, shuffle=True, num_workers=8, pin_memory=True)
T = 4.0
running = torch.zeros((), device=device)
for epoch in range(10):
    student.train()
    for step, (x, y) in enumerate(loader):
        x = x.to(device, non_blocking=True)
        y = y.to(device, non_blocking=True)
        with torch.no_grad():
            wanted = F.softmax(teacher(x) / T, dim=1)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            out = student(x)
            soft = F.kl_div(F.log_softmax(out / T, dim=1), wanted, reduction="batchmean")
            loss = T * T * soft + F.cross_entropy(out, y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        running += loss.detach()
        if step % 100 == 99:
            print(epoch, step, (running / 100).item())
            running.zero_()
