"""The Trainer of transformers under any protocol: its train() as a Paceline loop.

python examples/09_hugging_face.py                                        one worker
paceline launch --workers 2 --protocol k-batch-async:2 examples/09_hugging_face.py
"""

import argparse

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    DistilBertConfig,
    DistilBertForSequenceClassification,
    Trainer,
    TrainingArguments,
)

import paceline


class PacelineTrainer(Trainer):
    def train(self) -> None:
        pace, args = paceline.connect(), self.args
        unsupported = args.max_steps > 0, args.fp16, args.bf16, args.num_train_epochs % 1
        if any(unsupported) or args.gradient_accumulation_steps > 1:
            raise ValueError("PacelineTrainer trains whole epochs in fp32, a batch at a time")
        loader, epochs = self.get_train_dataloader(), int(args.num_train_epochs)
        self.create_optimizer_and_scheduler(len(loader) * epochs)
        parts = self.model.to(pace.device), self.optimizer, loader, self.lr_scheduler
        model, optimizer, loader, scheduler = pace.prepare(*parts)
        for epoch in pace.epochs(epochs):
            for inputs in loader:
                with pace.step():
                    optimizer.zero_grad()
                    self.compute_loss(model.train(), inputs).backward()
                    pace.clip_grad_norm_(model.parameters(), args.max_grad_norm or 1e30)
                    optimizer.step()
                    scheduler.step()
            self.state.epoch, self.state.global_step = epoch + 1, pace.version
            if pace.is_main and self.eval_dataset is not None:
                self.evaluate()


class Sentences(Dataset[dict[str, Tensor]]):
    """Made-up sentences of eight words, labelled by whether most come late in the alphabet."""

    def __init__(self, num_sentences: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.words = torch.randint(12, (num_sentences, 8), generator=generator)
        self.labels = (self.words > 5).float().mean(1).gt(0.5).long()

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.words[index], "labels": self.labels[index]}


parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
arguments = parser.parse_args()

torch.manual_seed(0)
config = DistilBertConfig(vocab_size=12, dim=32, hidden_dim=64, n_layers=1, n_heads=2)
trainer = PacelineTrainer(
    model=DistilBertForSequenceClassification(config),
    args=TrainingArguments(
        output_dir="runs/hugging-face",
        per_device_train_batch_size=32,  # per update, for any number of workers
        learning_rate=3e-3,
        num_train_epochs=arguments.epochs,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    ),
    train_dataset=Sentences(1024, 1),
    eval_dataset=Sentences(256, 2),
)
trainer.train()
