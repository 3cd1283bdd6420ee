import torch
import torch.nn as nn


class CharRNN(nn.Module):
    def __init__(self, vocab, hidden):
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.lstm = nn.LSTM(hidden, hidden, batch_first=True)
        self.head = nn.Linear(hidden, vocab)

    def forward(self, x, state=None):
        h, state = self.lstm(self.embed(x), state)
        return self.head(h), state


text = open("shakespeare.txt").read()
chars = sorted(set(text))
index = {c: i for i, c in enumerate(chars)}
ids = torch.tensor([index[c] for c in text])
device = "cuda:0"
model = CharRNN(len(chars), 256).to(device)
loss_fn = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
state = None
total = 0
for step in range(10000):
    start = (step * 64) % (len(ids) - 65)
    x = ids[start : start + 64].unsqueeze(0).to(device)
    y = ids[start + 1 : start + 65].unsqueeze(0).to(device)
    logits, state = model(x, state)  # <- hidden-not-detached
    loss = loss_fn(logits.view(-1, len(chars)), y.view(-1))
    optimizer.zero_grad()
    loss.backward(retain_graph=True)  # <- graph-retained
    optimizer.step()
    total += loss  # <- loss-keeps-graph
    if step % 500 == 0:
        print(step, float(total) / (step + 1))
