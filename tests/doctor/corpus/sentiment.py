import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset


class Reviews(Dataset):
    def __init__(self, path):
        self.rows = [line.rstrip("\n").split("\t") for line in open(path)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        label, words = self.rows[i]
        return torch.tensor([hash(w) % 5000 for w in words.split()][:100]), int(label)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.EmbeddingBag(5000, 64)
        self.drop = nn.Dropout(0.5)
        self.out = nn.Linear(64, 2)
        self.softmax = nn.Softmax(dim=-1)

    def forward(self, words):
        h = self.emb(words)
        h = self.drop(h)
        return self.softmax(self.out(h))


def evaluate(net, loader, device):
    hits = 0
    for words, label in loader:
        scores = net(words.to(device))  # <- evaluated-with-gradients
        hits += (scores.argmax(1).cpu() == label).sum().item()
    return hits


def run():
    device = torch.device("cuda")
    net = Net().to(device)
    train = DataLoader(Reviews("train.tsv"), batch_size=1)  # <- shuffle-missing
    test = DataLoader(Reviews("test.tsv"), batch_size=1)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(net.parameters())
    epoch_loss = 0
    for epoch in range(10):
        net.train()
        for words, label in train:
            scores = net(words.to(device))
            loss = criterion(scores, label.to(device))  # <- softmax-into-cross-entropy
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            epoch_loss = epoch_loss + loss  # <- loss-keeps-graph
        net.eval()
        print(epoch, epoch_loss, evaluate(net, test, device))


run()
