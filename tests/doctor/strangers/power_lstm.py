import argparse

import numpy as np
import pandas as pd
import torch
import torch.nn as nn
from sklearn.preprocessing import StandardScaler
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--csv", default="household_power.csv")
parser.add_argument("--window", type=int, default=96)
parser.add_argument("--epochs", type=int, default=30)
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"

frame = pd.read_csv(args.csv).ffill()
values = frame[["load", "temperature", "humidity"]].values.astype(np.float32)
scaler = StandardScaler()
values = scaler.fit_transform(values)  # wrong: the scaler is fitted on the days that are kept for testing too
cut = int(len(values) * 0.8)
train_values, test_values = values[:cut], values[cut:]


class Windows(Dataset):
    def __init__(self, values, window):
        self.values = torch.from_numpy(values)
        self.window = window

    def __len__(self):
        return len(self.values) - self.window

    def __getitem__(self, i):
        x = self.values[i : i + self.window]
        y = self.values[i + self.window, 0]
        return x, y


class Forecaster(nn.Module):
    def __init__(self, features=3, hidden=128):
        super().__init__()
        self.lstm = nn.LSTM(features, hidden, num_layers=2, batch_first=True, dropout=0.2)
        self.head = nn.Linear(hidden, 1)

    def forward(self, x):
        out, _ = self.lstm(x)
        return self.head(out[:, -1])


train_loader = DataLoader(Windows(train_values, args.window), batch_size=64, shuffle=True)
test_loader = DataLoader(Windows(test_values, args.window), batch_size=64)

model = Forecaster().to(device)
criterion = nn.MSELoss()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

history = []
for epoch in range(args.epochs):
    model.train()
    running = 0
    for x, y in train_loader:
        x, y = x.to(device), y.to(device)
        optimizer.zero_grad()
        pred = model(x)
        loss = criterion(pred, y)  # wrong: pred is (B, 1) and y is (B,): the difference is a B x B table
        loss.backward()
        optimizer.step()
        running += loss  # wrong: the sum keeps the graph of each batch
    history.append(running / len(train_loader))

    test_loss = 0.0
    for x, y in test_loader:  # wrong: tested in training mode (dropout is on), and with gradients
        x, y = x.to(device), y.to(device)
        test_loss += criterion(model(x), y).item()
    print(f"epoch {epoch}: train {running / len(train_loader):.4f} test {test_loss / len(test_loader):.4f}")

torch.save(model.state_dict(), "forecaster.pt")
