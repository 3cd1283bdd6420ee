# CS-3410 assignment 4: generate names of dinosaurs
import random
import string

import torch
import torch.nn as nn
import torch.nn.functional as F

device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
all_chars = string.printable
n_chars = len(all_chars)
text = open("data/dinos.txt").read()
chunk_len, batch_size = 64, 32


class CharRNN(nn.Module):
    def __init__(self, n_chars, emb_size=100, hidden=128, layers=2):
        super().__init__()
        self.layers, self.hidden = layers, hidden
        self.emb = nn.Embedding(n_chars, emb_size)
        self.gru = nn.GRU(emb_size, hidden, layers, batch_first=True)
        self.fc1 = nn.Linear(hidden, 256)
        self.fc2 = nn.Linear(128, n_chars)  # wrong: fc1 gives 256 features, not 128

    def forward(self, x, h):
        e = self.emb(x)
        o, h = self.gru(e, h)
        o = self.fc1(o)
        o = F.relu(o)
        return self.fc2(o), h

    def init_hidden(self, n):
        return torch.zeros(self.layers, n, self.hidden).to(device)


def char_tensor(s):
    return torch.tensor([all_chars.index(c) for c in s])


def streams():
    """The text cut into batch_size long rows, walked through chunk by chunk."""
    row = len(text) // batch_size
    rows = torch.stack([char_tensor(text[i * row : (i + 1) * row]) for i in range(batch_size)])
    for j in range(0, row - chunk_len - 1, chunk_len):
        yield rows[:, j : j + chunk_len], rows[:, j + 1 : j + chunk_len + 1]


model = CharRNN(n_chars).to(device)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
losses = []

for epoch in range(20):
    hidden = model.init_hidden(batch_size)
    for inp, target in streams():
        inp, target = inp.to(device), target.to(device)
        output, hidden = model(inp, hidden)  # wrong: the hidden state keeps the graph of the chunks before
        loss = criterion(output.reshape(-1, n_chars), target.reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())  # wrong: waits for the device with every batch
    print("epoch", epoch, sum(losses[-50:]) / 50)


def generate(start="A", n=200, temp=0.8):
    model.eval()
    h = model.init_hidden(1)
    s = start
    with torch.no_grad():
        x = char_tensor(start).unsqueeze(0).to(device)
        for _ in range(n):
            out, h = model(x, h)
            p = F.softmax(out[0, -1] / temp, dim=0)
            c = torch.multinomial(p, 1).item()
            s += all_chars[c]
            x = torch.tensor([[c]], device=device)
    return s


print(generate(random.choice(string.ascii_uppercase)))
