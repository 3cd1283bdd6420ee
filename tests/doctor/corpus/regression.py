import torch
import torch.nn as nn
import torch.nn.functional as F

x = torch.linspace(-3, 3, 400).unsqueeze(1)
y = torch.sin(x) + 0.1 * torch.randn(400, 1)
model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
history = []
for step in range(5000):
    prediction = model(x)
    loss = F.mse_loss(prediction, y)
    loss.backward()
    optimizer.step()  # <- zero-grad-missing
    history.append(loss)  # <- loss-keeps-graph
    if step % 1000 == 0:
        print(step, loss.item())
