"""At the top of the file, with accumulation and clipping where gradients are whole."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

gradient_accumulation_steps = 3
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=gradient_accumulation_steps)
torch.manual_seed(9)
inputs = torch.randn(40, 8, generator=torch.Generator().manual_seed(1))
loader = DataLoader(TensorDataset(inputs, inputs[:, :3].argmax(dim=1)), 4, shuffle=True)
model = nn.Linear(8, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.9)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

for epoch in range(3):
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    accelerator.print(f"epoch {epoch} loss {loss.item():.4f}")

if accelerator.is_main_process:
    torch.save(accelerator.get_state_dict(model), "end.pt")
