import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
from torchvision import datasets, models, transforms


class TwoViews:
    def __init__(self, transform):
        self.transform = transform

    def __call__(self, image):
        return self.transform(image), self.transform(image)


augment = transforms.Compose(
    [
        transforms.RandomResizedCrop(32, scale=(0.2, 1.0)),
        transforms.RandomHorizontalFlip(),
        transforms.RandomApply([transforms.ColorJitter(0.4, 0.4, 0.4, 0.1)], p=0.8),
        transforms.RandomGrayscale(p=0.2),
        transforms.ToTensor(),
    ]
)


class SimCLR(nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.encoder = models.resnet18(num_classes=512)
        self.encoder.conv1 = nn.Conv2d(3, 64, 3, 1, 1, bias=False)
        self.encoder.maxpool = nn.Identity()
        self.projector = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, width))

    def forward(self, x):
        return F.normalize(self.projector(self.encoder(x)), dim=1)


def nt_xent(a, b, temperature=0.5):
    n = a.shape[0]
    z = torch.cat([a, b])
    similarity = z @ z.T / temperature
    similarity.fill_diagonal_(float("-inf"))
    partner = torch.cat([torch.arange(n, 2 * n), torch.arange(0, n)]).to(z.device)
    return F.cross_entropy(similarity, partner)


def main():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_set = datasets.CIFAR10("data", train=True, download=True, transform=TwoViews(augment))
    loader = DataLoader(
        train_set, batch_size=512, shuffle=True, drop_last=True, num_workers=8, pin_memory=True, persistent_workers=True
    )
    model = SimCLR().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-6)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)

    for epoch in range(200):
        model.train()
        total = torch.zeros((), device=device)
        for (a, b), _ in loader:
            a = a.to(device, non_blocking=True)
            b = b.to(device, non_blocking=True)
            loss = nt_xent(model(a), model(b))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            total += loss.detach()
        scheduler.step()
        print(f"epoch {epoch}: {total.item() / len(loader):.4f}")
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, "simclr.pt")


if __name__ == "__main__":
    main()
