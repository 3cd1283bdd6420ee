import numpy as np
import torch
import torch.nn as nn
import torch.optim as optim
from sklearn.datasets import fetch_california_housing
from sklearn.model_selection import train_test_split

X, y = fetch_california_housing(return_X_y=True)
X_train, X_test, y_train, y_test = train_test_split(X, y, test_size=0.2, random_state=42)
mean, std = X_train.mean(0), X_train.std(0)
X_train = torch.tensor((X_train - mean) / std, dtype=torch.float32)
X_test = torch.tensor((X_test - mean) / std, dtype=torch.float32)
y_train = torch.tensor(y_train, dtype=torch.float32).view(-1, 1)
y_test = torch.tensor(y_test, dtype=torch.float32).view(-1, 1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(8, 128)
        self.fc2 = nn.Linear(128, 64)
        self.fc3 = nn.Linear(64, 1)
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        x = torch.relu(self.fc1(x))
        x = self.drop(x)
        x = torch.relu(self.fc2(x))
        return torch.relu(self.fc3(x))  # wrong: a ReLU on the output of a regression: it can die, and has no gradient below 0


model = Net()
loss_fn = nn.MSELoss()
optimizer = optim.SGD(model.parameters(), lr=0.01)
scheduler = optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=5)
batch = 256
best, patience = np.inf, 0

model.train()
for epoch in range(300):
    # no shuffling between the epochs
    for i in range(0, len(X_train), batch):  # wrong: the same batches in the same order each epoch
        xb = X_train[i : i + batch]
        yb = y_train[i : i + batch]
        loss = loss_fn(model(xb), yb)
        loss.backward()
        optimizer.step()  # wrong: zero_grad is never called

    model.eval()  # wrong: never set back to training: dropout is off from the second epoch on
    with torch.no_grad():
        test_loss = loss_fn(model(X_test), y_test)
    scheduler.step()  # wrong: ReduceLROnPlateau wants the loss
    if test_loss < best:  # wrong: the best epoch is chosen by the test data
        best, patience = test_loss, 0
        best_weights = model.state_dict()  # wrong: not a copy: it goes on changing with the model
    else:
        patience += 1
        if patience > 20:
            break
model.load_state_dict(best_weights)
print("best test mse", best.item())
