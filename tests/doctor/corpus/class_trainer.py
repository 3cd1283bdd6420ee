import torch
import torch.nn as nn


class Trainer:
    def __init__(self, model, train_loader, val_loader, lr=1e-3):
        self.device = torch.device("cuda")
        self.model = model.to(self.device)
        self.train_loader = train_loader
        self.val_loader = val_loader
        self.criterion = nn.CrossEntropyLoss()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=lr)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 50)

    def train_epoch(self):
        self.model.train()
        total = 0.0
        for inputs, targets in self.train_loader:
            inputs = inputs.to(self.device)
            targets = targets.to(self.device)
            self.optimizer.zero_grad()
            outputs = self.model(inputs)
            loss = self.criterion(outputs, targets)
            loss.backward()
            self.optimizer.step()
            torch.cuda.synchronize()  # <- synchronized-each-turn
            total += loss.item()  # <- item-in-loop
        return total / len(self.train_loader)

    def validate(self):
        self.model.eval()
        hits = 0
        for inputs, targets in self.val_loader:
            outputs = self.model(inputs.to(self.device))  # <- evaluated-with-gradients
            hits += (outputs.argmax(1).cpu() == targets).sum().item()
        return hits

    def fit(self, epochs):
        for epoch in range(epochs):
            self.scheduler.step()  # <- scheduler-before-step
            loss = self.train_epoch()
            print(epoch, loss, self.validate())
