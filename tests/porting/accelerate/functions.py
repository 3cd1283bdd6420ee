"""training_function(config, args), loaders from a function, gathered metrics."""

import argparse

import torch
from accelerate import Accelerator, DistributedType
from torch import nn
from torch.optim import AdamW
from torch.utils.data import DataLoader, TensorDataset

MAX_GPU_BATCH_SIZE = 16


def get_dataloaders(accelerator: Accelerator, batch_size: int = 16):
    with accelerator.main_process_first():
        inputs = torch.randn(60, 8, generator=torch.Generator().manual_seed(1))
    dataset = TensorDataset(inputs, inputs[:, :3].argmax(dim=1))
    train_dataloader = DataLoader(dataset, shuffle=True, batch_size=batch_size)
    eval_dataloader = DataLoader(
        dataset, batch_size=20, drop_last=(accelerator.mixed_precision == "fp8")
    )
    return train_dataloader, eval_dataloader


def training_function(config, args):
    accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.mixed_precision)
    num_epochs = int(config["num_epochs"])
    batch_size = int(config["batch_size"])
    if batch_size > MAX_GPU_BATCH_SIZE and accelerator.distributed_type != DistributedType.XLA:
        batch_size = MAX_GPU_BATCH_SIZE
    torch.manual_seed(config["seed"])
    train_dataloader, eval_dataloader = get_dataloaders(accelerator, batch_size)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = AdamW(params=model.parameters(), lr=config["lr"])
    lr_scheduler = torch.optim.lr_scheduler.LinearLR(
        optimizer, total_iters=len(train_dataloader) * num_epochs
    )

    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )

    for epoch in range(num_epochs):
        model.train()
        for step, batch in enumerate(train_dataloader):
            inputs, targets = (one.to(accelerator.device) for one in batch)
            loss = nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            if accelerator.is_main_process and step % 4 == 0:
                print(f"loss {loss.item():.4f}")
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()

        model.eval()
        right = 0
        for inputs, targets in eval_dataloader:
            with torch.no_grad():
                predictions = model(inputs.to(accelerator.device)).argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, targets))
            right += (predictions == references).sum().item()
        accelerator.print(f"epoch {epoch}: right {right}")
    accelerator.wait_for_everyone()
    unwrapped = accelerator.unwrap_model(model)
    accelerator.save(unwrapped.state_dict(), "end.pt")
    accelerator.end_training()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mixed_precision", type=str, default=None)
    parser.add_argument("--cpu", action="store_true", default=True)
    args = parser.parse_args([])
    training_function({"lr": 2e-2, "num_epochs": 3, "seed": 42, "batch_size": 16}, args)


if __name__ == "__main__":
    main()
