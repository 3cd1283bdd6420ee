"""A small GPT that learns to predict the next byte of a text.

    (B, T) bytes -> tokens + positions -> 4 x [ + attention(norm), + MLP(norm) ] -> norm
                 -> logits (B, T, 256)

The text is that of Python's own help topics (``pydoc_data.topics``, 465,000 characters of English
prose and code under Python's licence): it comes with every interpreter, so nothing is fetched. A
metric is a mean over a window's positions, summed over windows. It must not know who trains it.

Source: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019: norms before
the sublayers, weights from N(0, 0.02^2), those of residual outputs smaller with the depth, the
embedding tied to the output.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..data.arrays import ArrayDataset
from ..data.fetch import Chooser, choose_here
from ..errors import ConfigError
from .base import Splits, Task, chosen_init

NUM_TOKENS = 256
WINDOW = 128
_TEST_SHARE = 0.1


class Block(nn.Module):
    """Attention to what came before, then a two-layer network, each added to its input."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.to_heads = nn.Linear(width, 3 * width)
        self.from_heads = nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, inputs: Tensor) -> Tensor:
        size, length, width = inputs.shape
        heads = self.to_heads(self.norm_1(inputs)).view(size, length, 3, self.num_heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        inputs = inputs + self.from_heads(seen.transpose(1, 2).reshape(size, length, width))
        inner = nn.functional.gelu(self.widen(self.norm_2(inputs)))
        outputs: Tensor = inputs + self.narrow(inner)
        return outputs


class Transformer(nn.Module):
    """(B, T) int64 -> logits (B, T, tokens); T at most ``window``."""

    def __init__(
        self,
        *,
        num_tokens: int = NUM_TOKENS,
        window: int = WINDOW,
        width: int = 128,
        num_heads: int = 4,
        depth: int = 4,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(num_tokens, width)
        self.positions = nn.Embedding(window, width)
        self.blocks = nn.Sequential(*(Block(width, num_heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                is_residual = "from_heads" in name or "narrow" in name
                std = 0.02 / math.sqrt(2 * depth) if is_residual else 0.02
                nn.init.normal_(parameter, std=std)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, inputs: Tensor) -> Tensor:
        places = torch.arange(inputs.shape[1], device=inputs.device)
        hidden = self.blocks(self.tokens(inputs) + self.positions(places))
        return nn.functional.linear(self.norm(hidden), self.tokens.weight)


def build(depth: int = 4, width: int = 128) -> nn.Module:
    """842,496 parameters as it is; ``depth=12, width=768`` is GPT-2's body."""
    return Transformer(depth=depth, width=width, num_heads=max(1, width // 32))


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of the next byte, in nats, over (B, T, tokens) and (B, T)."""
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def metrics(outputs: Tensor, targets: Tensor) -> dict[str, tuple[float, float]]:
    """Share of next bytes that are right, and the loss: sums over windows with their count."""
    count = float(len(targets))
    right = (outputs.argmax(dim=2) == targets).float().mean(dim=1).sum().item()
    return {"acc": (right, count), "loss": (loss_of(outputs, targets).item() * count, count)}


def samples() -> Splits:
    """Return adjacent windows of the text; the last tenth is for testing."""
    text = _text()
    values = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(torch.int64)
    num_windows = (len(values) - 1) // WINDOW
    inputs = values[: num_windows * WINDOW].view(num_windows, WINDOW)
    targets = values[1 : num_windows * WINDOW + 1].view(num_windows, WINDOW)
    stop = num_windows - round(_TEST_SHARE * num_windows)
    return Splits(
        train=ArrayDataset(inputs[:stop], targets[:stop]),
        test=ArrayDataset(inputs[stop:], targets[stop:]),
        source=f"Python's help topics ({stop:,} + {num_windows - stop:,} windows of {WINDOW} B)",
    )


def _text() -> bytes:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise ConfigError(
            "this Python has no help topics (pydoc_data), the text that the transformer task "
            "uses; install Python's full standard library"
        ) from None
    return "\n".join(topics[name] for name in sorted(topics)).encode()


def adamw(parameters: Iterable[nn.Parameter], learning_rate: float) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=learning_rate)


def transformer(
    num_workers: int = 1, init: str | None = None, chooser: Chooser = choose_here
) -> Task:
    """The GPT on Python's help topics; ``init`` is "default", the paper's."""
    chosen_init("transformer", init, ("default",))
    return Task(
        name="transformer",
        model=build,
        loss=loss_of,
        data=samples,
        learning_rate=1e-3,
        batch_size=32,
        epochs=5,
        metrics=metrics,
        optimizer=adamw,
        notes=("accuracy is the share of next bytes that are guessed right",),
    )
