"""A Trainer that calls next() and renews its iterator, for a number of iterations."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Trainer:
    def __init__(self, config, model, train_dataset):
        self.config = config
        self.model = model
        self.optimizer = None
        self.train_dataset = train_dataset

    def run(self):
        model, config = self.model, self.config

        # setup the optimizer
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])

        # setup the dataloader
        train_loader = DataLoader(self.train_dataset, batch_size=8, shuffle=True, drop_last=True)

        model.train()
        self.iter_num = 0
        data_iter = iter(train_loader)
        while True:
            # fetch the next batch (x, y) and re-init iterator if needed
            try:
                batch = next(data_iter)
            except StopIteration:
                data_iter = iter(train_loader)
                batch = next(data_iter)
            x, y = batch

            # forward the model
            self.loss = nn.functional.cross_entropy(model(x), y)

            # backprop and update the parameters
            model.zero_grad(set_to_none=True)
            self.loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config["clip"])
            self.optimizer.step()

            self.iter_num += 1
            if self.iter_num >= config["max_iters"]:
                break


def main():
    torch.manual_seed(4)
    inputs = torch.randn(60, 8)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    data = TensorDataset(inputs, inputs[:, :3].argmax(dim=1))
    trainer = Trainer({"lr": 0.01, "clip": 1.0, "max_iters": 14}, model, data)
    trainer.run()
    print(f"loss {trainer.loss.item():.4f}")
    torch.save(model.state_dict(), "end.pt")


if __name__ == "__main__":
    main()
