"""An encoder and a decoder, trained by one optimizer; loaders come from a function."""

import argparse
import itertools
import os

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


class Points(TensorDataset):
    """Stands for a data set that downloads itself."""

    def __init__(self, root, download=False):
        if download and not os.path.exists(os.path.join(root, "points.pt")):
            torch.save(torch.randn(48, 6), os.path.join(root, "points.pt"))
        super().__init__(torch.load(os.path.join(root, "points.pt")))


def get_loaders(args):
    train_set = Points(args.data, download=True)
    test_set = Points(args.data, download=True)
    return DataLoader(train_set, batch_size=12, shuffle=True), DataLoader(test_set, batch_size=24)


def evaluate(encoder, decoder, loader):
    with torch.no_grad():
        return sum(((decoder(encoder(x)) - x) ** 2).sum().item() for (x,) in loader)


def main(args):
    if not os.path.exists(args.data):
        os.makedirs(args.data)
    train_loader, test_loader = get_loaders(args)
    encoder = nn.Sequential(nn.Linear(6, 3), nn.Tanh())
    decoder = nn.Linear(3, 6)
    params = itertools.chain(encoder.parameters(), decoder.parameters())
    optimizer = torch.optim.RMSprop(params, lr=1e-2)
    with open("log.txt", "w") as log:
        log.write("begun\n")
    for epoch in range(args.epochs):
        for (x,) in train_loader:
            loss = nn.functional.mse_loss(decoder(encoder(x)), x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(epoch, evaluate(encoder, decoder, test_loader))
    torch.save(encoder.state_dict(), "encoder.pt")
    torch.save(decoder.state_dict(), "end.pt")


if __name__ == "__main__":
    torch.manual_seed(5)
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default="data")
    parser.add_argument("--epochs", type=int, default=3)
    main(parser.parse_args([]))
