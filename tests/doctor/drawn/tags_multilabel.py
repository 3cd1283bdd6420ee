# Predicts the tags of a question from its words (bag of words, 500 tags)
import json

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

n_words, n_tags = 20000, 500


class Questions(Dataset):
    def __init__(self, path):
        with open(path) as f:
            self.rows = [json.loads(line) for line in f]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]["words"], self.rows[index]["tags"]


def collate_fn(batch):
    x = torch.zeros(len(batch), n_words)
    y = torch.zeros(len(batch), n_tags)
    for i, (words, tags) in enumerate(batch):
        for w in words:  # wrong: one assignment to a tensor for each word
            x[i, w] = 1.0
        for t in tags:
            y[i, t] = 1.0
    return x, y


train_loader = DataLoader(Questions("train.jsonl"), batch_size=256, shuffle=True, collate_fn=collate_fn, num_workers=4, pin_memory=True)
valid_loader = DataLoader(Questions("valid.jsonl"), batch_size=256, collate_fn=collate_fn, num_workers=4, pin_memory=True)

model = nn.Sequential(
    nn.Linear(n_words, 1024),
    nn.ReLU(),
    nn.Dropout(0.5),
    nn.Linear(1024, n_tags),
)
model = model.half().cuda()  # wrong: weights of 16 bits are trained, and no copy of 32 bits is kept
loss_function = nn.BCELoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)

for epoch in range(1, 16):
    model.train()
    for n, (x, y) in enumerate(train_loader, 1):
        x = x.cuda(non_blocking=True).half()
        y = y.cuda(non_blocking=True).half()
        scores = model(x)
        loss = loss_function(scores, y)  # wrong: raw scores, and BCELoss wants probabilities
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if n % 100 == 0:
            print("Epoch", epoch, "batch", n, "loss", float(loss))

    model.eval()
    right = found = there = 0
    with torch.no_grad():
        for x, y in valid_loader:
            guess = model(x.cuda().half()) > 0
            y = y.cuda() > 0
            right += (guess & y).sum()
            found += guess.sum()
            there += y.sum()
    print("Epoch", epoch, "precision", float(right / found), "recall", float(right / there))
