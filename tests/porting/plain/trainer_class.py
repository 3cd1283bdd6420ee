"""A Trainer that makes its own optimizer and clips; the rate changes after each step."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset


class Trainer:
    def __init__(self, config: dict, model: nn.Module, train_dataset: Dataset) -> None:
        self.config = config
        self.model = model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config["lr"])
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, max_lr=config["lr"], total_steps=24
        )
        self.loader = DataLoader(train_dataset, batch_size=8, shuffle=True)

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(self.model(source), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config["clip"])
        self.optimizer.step()
        self.scheduler.step()
        return loss.item()

    def _run_epoch(self, epoch):
        shape = next(iter(self.loader))[0].shape
        for source, targets in self.loader:
            loss = self._run_batch(source, targets)
        print(f"epoch {epoch} of batches {tuple(shape)}: loss {loss:.4f}")

    def train(self, max_epochs):
        self.model.train()
        for epoch in range(max_epochs):
            self._run_epoch(epoch)


def main():
    torch.manual_seed(2)
    inputs = torch.randn(64, 8)
    model = nn.Linear(8, 3)
    trainer = Trainer(
        {"lr": 0.1, "clip": 0.5}, model, TensorDataset(inputs, inputs[:, :3].argmax(dim=1))
    )
    trainer.train(3)
    torch.save(model.state_dict(), "end.pt")


if __name__ == "__main__":
    main()
