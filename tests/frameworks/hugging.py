"""A script with a transformers Trainer.

    python hugging.py FOLDER plain|paceline BATCH_SIZE [NORM]

Each worker saves its result in FOLDER/worker-N.pt. The subclass is that of the example.
"""

import ast
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, SequentialSampler
from transformers import Trainer, TrainingArguments

import paceline

NUM_SAMPLES, EPOCHS = 48, 3
EXAMPLE = Path(__file__).parents[2] / "examples" / "09_hugging_face.py"


def subclass() -> str:
    """The text of the subclass, as the example has it."""
    text = EXAMPLE.read_text()
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef) and node.name == "PacelineTrainer":
            return ast.get_source_segment(text, node) or ""
    raise AssertionError(f"{EXAMPLE} has no PacelineTrainer")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        found = self.layers(inputs)
        return {"loss": nn.functional.mse_loss(found, labels), "logits": found}


class Samples(Dataset[dict[str, Tensor]]):
    def __init__(self) -> None:
        self.inputs = torch.randn(NUM_SAMPLES, 3, generator=torch.Generator().manual_seed(2))

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"inputs": self.inputs[index], "labels": self.inputs[index].sin().sum(0, True)}


def main() -> None:
    folder, kind, batch_size = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    norm = float([*sys.argv, 0.3][4])
    torch.set_default_dtype(torch.float64)
    pace = paceline.connect() if kind == "paceline" else None
    names: dict[str, Any] = {"Trainer": Trainer, "paceline": paceline}
    exec(subclass(), names)

    class InOrder(names["PacelineTrainer"] if pace else Trainer):  # type: ignore[misc]
        """Keeps the order, so that all ways have the same batches."""

        def _get_train_sampler(self, *_: Any) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

    backend = "gloo" if "RANK" in os.environ else None
    torch.manual_seed(1)
    net = Net()
    trainer = InOrder(
        model=net,
        args=TrainingArguments(
            output_dir=str(folder / "out"), per_device_train_batch_size=batch_size,
            num_train_epochs=EPOCHS, learning_rate=0.01, max_grad_norm=norm, use_cpu=True,
            save_strategy="no", report_to="none", disable_tqdm=True, ddp_backend=backend,
        ),
        train_dataset=Samples(),
        eval_dataset=Samples(),
    )  # fmt: skip
    trainer.train()
    found = {
        "state": net.state_dict(),
        "steps": trainer.state.global_step,
        "processes": trainer.args.world_size,
        "rate": trainer.lr_scheduler.get_last_lr()[0],
    }
    number = pace.worker if pace else os.environ.get("RANK", 0)
    torch.save(found, folder / f"worker-{number}.pt")
    if not pace and torch.distributed.is_initialized():  # as in lit.py
        torch.distributed.barrier()
        os._exit(0)


if __name__ == "__main__":
    main()
