"""A small GPT over the letters of a text that draws its own batches: no loader, no epochs.

python examples/06_without_a_loader.py                                    one worker
paceline launch --workers 2 --protocol k-async:2 examples/06_without_a_loader.py
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

import paceline

parser = argparse.ArgumentParser()
parser.add_argument("--updates", type=int, default=300)
parser.add_argument("--text", type=Path, default=Path(__file__), help="the text to learn")
arguments = parser.parse_args()

text = arguments.text.read_text()
letters = sorted(set(text))
data = torch.tensor([letters.index(letter) for letter in text])
BATCH_SIZE, LENGTH, WIDTH = 24, 64, 128


class Gpt(nn.Module):
    """Four layers; (B, T) letters -> (B, T, letters)."""

    def __init__(self) -> None:
        super().__init__()
        self.letter = nn.Embedding(len(letters), WIDTH)
        self.position = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, len(letters))

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        hidden = self.letter(tokens) + self.position[: tokens.shape[1]]
        return self.head(self.layers(hidden, mask, is_causal=True))


def get_batch() -> tuple[Tensor, Tensor]:
    """Return random windows of the text, and the next letter for each letter."""
    starts = torch.randint(len(data) - LENGTH, (BATCH_SIZE,)).tolist()
    windows = torch.stack([data[start : start + LENGTH + 1] for start in starts])
    return windows[:, :-1], windows[:, 1:]


torch.manual_seed(0)
pace = paceline.connect()
model = Gpt()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
model, optimizer = pace.prepare(model, optimizer)

for _ in pace.updates(arguments.updates):
    with pace.step() as step:
        inputs, targets = get_batch()
        loss = nn.functional.cross_entropy(model(inputs).transpose(1, 2), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if step.was_superseded:  # under k-sync: cancelled, and in no update
        continue
    if pace.version % 50 == 0 or pace.version == arguments.updates:
        pace.print(f"version {pace.version}: loss {loss:.3f}")
