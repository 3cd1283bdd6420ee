import torch
import torch.nn.functional as F
import torchaudio
from torch import nn
from torch.cuda.amp import GradScaler, autocast
from torch.utils.data import DataLoader
from tqdm import tqdm

LABELS = sorted(["yes", "no", "up", "down", "left", "right", "on", "off", "stop", "go"])
mel = torchaudio.transforms.MelSpectrogram(16000, n_mels=64)


def collate(items):
    items = [(w, l) for w, _, l, *_ in items if l in LABELS]
    wav = torch.zeros(len(items), 16000)
    for row, (w, _) in zip(wav, items):
        row[: w.shape[1]] = w[0, :16000]
    return mel(wav).add(1e-6).log().unsqueeze(1), torch.tensor([LABELS.index(l) for _, l in items])


class KWS(nn.Module):
    def __init__(self, ch=48):
        super().__init__()
        self.c1 = nn.Conv2d(1, ch, 3, padding=1, bias=False)
        self.b1 = nn.BatchNorm2d(ch)
        self.c2 = nn.Conv2d(ch, 2 * ch, 3, padding=1, stride=2, bias=False)
        self.b2 = nn.BatchNorm2d(2 * ch)
        self.fc = nn.Linear(2 * ch, len(LABELS))

    def forward(self, x):
        x = F.relu(self.b1(self.c1(x)))
        x = F.relu(self.b2(self.c2(x)))
        return self.fc(x.mean((2, 3)))


def train_one_epoch(net, loader, opt, scaler):
    net.train()
    for x, y in tqdm(loader):
        x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
        opt.zero_grad()
        with autocast():
            loss = F.cross_entropy(net(x), y)
        nn.utils.clip_grad_norm_(net.parameters(), 5.0)  # wrong: there are no gradients yet
        scaler.scale(loss).backward()
        opt.step()  # wrong: past the scaler, so with gradients that are still scaled
        scaler.update()


@torch.no_grad()
def validate(net, loader):
    net.eval()
    total = 0.0
    for x, y in loader:
        total += F.cross_entropy(net(x.cuda()), y.cuda())
    return total.item() / len(loader)  # wrong: a mean of means: the last, smaller batch weighs as much as the others


if __name__ == "__main__":
    sets = {s: torchaudio.datasets.SPEECHCOMMANDS(".", download=True, subset=s) for s in ("training", "validation")}
    train_dl = DataLoader(sets["training"], 256, shuffle=True, collate_fn=collate, num_workers=8, pin_memory=True, drop_last=True)
    val_dl = DataLoader(sets["validation"], 256, collate_fn=collate, num_workers=8, pin_memory=True)
    net = KWS().cuda()
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scaler = GradScaler()
    for ep in range(30):
        train_one_epoch(net, train_dl, opt, scaler)
        print(ep, validate(net, val_dl))
    torch.save(net.state_dict(), "kws.pt")
