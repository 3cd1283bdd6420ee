"""A stand-in for ``pace`` without Paceline: one process, nothing shared, plain PyTorch.

The plain twin of a script is the same text with this instead of Paceline, so that only Paceline's
work differs. ``Drawn`` draws the orders of shuffled epochs from the seed and the epoch as several
workers do; nothing else here knows Paceline.
"""

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_model
from torch import Tensor, nn
from torch.utils.data import DataLoader

from paceline.data.order import EpochOrder
from paceline.replica.seeding import kept_random_state, mix
from paceline.script.worker import BESIDE_SALT


class Block:
    """The block of ``with pace.step() as step``; it does nothing."""

    was_superseded = False
    weight: float | None = None

    def skip(self) -> None:
        return


class Plain:
    """One worker of one."""

    worker = 0
    is_main = True
    seed = 0
    device = torch.device("cpu")
    clip_grad_norm_ = staticmethod(nn.utils.clip_grad_norm_)
    clip_grad_value_ = staticmethod(nn.utils.clip_grad_value_)

    def __init__(self, num_workers: int = 1) -> None:
        self.num_workers = num_workers
        self._modules: list[nn.Module] = []

    def prepare(self, *objects: Any, **_: Any) -> Any:
        self._modules += [
            one for model in objects if isinstance(model, nn.Module) for one in model.modules()
        ]
        return objects[0] if len(objects) == 1 else objects

    def epochs(self, epochs: int | Iterable[int]) -> Iterable[int]:
        return range(epochs) if isinstance(epochs, int) else epochs

    def updates(self, updates: int | None, loader: Any) -> Iterator[Any]:
        """Yield batches, pass after pass."""
        passes = (batch for _ in itertools.count() for batch in loader)
        return itertools.islice(passes, updates)

    @contextlib.contextmanager
    def trial(self, name: str | None = None) -> Iterator[None]:
        with kept_random_state():
            yield

    @contextlib.contextmanager
    def step(self) -> Iterator[Block]:
        yield Block()

    @contextlib.contextmanager
    def once(self) -> Iterator[bool]:
        yield True

    def evaluate(self, fn: Any, loader: "DataLoader[Any]") -> dict[str, tuple[float, float]]:
        """Return the sums, without gradients and with the model in evaluation mode."""
        totals: dict[str, tuple[float, float]] = {}
        with torch.no_grad(), self._evaluating():
            for batch in loader:
                for name, (value, count) in fn(batch).items():
                    old = totals.get(name, (0.0, 0.0))
                    totals[name] = (old[0] + float(value), old[1] + float(count))
        return totals

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        flags = [(one, one.training) for one in self._modules]
        for one, _ in flags:
            one.training = False
        yield
        for one, was_training in flags:
            one.training = was_training

    def sum(self, value: Any) -> float:
        return float(value)

    def edit_gradients(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def autocast(self, dtype: torch.dtype = torch.bfloat16) -> torch.autocast:
        return torch.autocast("cpu", dtype=dtype)

    def log(self, values: Any) -> None:
        return

    def print(self, *values: object) -> None:
        return

    def save(self, name: str = "model.safetensors") -> Path:
        save_model(self._modules[0], name)
        return Path(name)

    def publish(self, model: nn.Module) -> None:
        return

    def keep(self, **things: Any) -> None:
        return

    def stop(self) -> None:
        return


class Drawn(Plain):
    """The same, with epochs in the order drawn by several workers."""

    _num_beside = 0

    def prepare(self, *objects: Any, **options: Any) -> Any:
        is_beside = not any(isinstance(one, nn.Module) for one in objects)
        self._num_beside += is_beside
        seed = mix(self.seed, self._num_beside, BESIDE_SALT) if is_beside else self.seed
        drawn = [Redrawn(one, seed) if isinstance(one, DataLoader) else one for one in objects]
        return super().prepare(*drawn, **options)


class Redrawn:
    """A loader whose order is drawn from the seed and the epoch."""

    def __init__(self, loader: "DataLoader[Any]", seed: int) -> None:
        self.dataset: Any = loader.dataset
        self._loader = loader
        self._order = EpochOrder(loader, seed)
        self._epoch = 0

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        collate: Any = self._loader.collate_fn
        ends = self._order.draw(self._epoch)
        self._epoch += 1
        indices = self._order.indices
        for start, stop in self._bounds(ends, len(indices)):
            yield collate([self.dataset[index] for index in indices[start:stop]])

    def _bounds(self, ends: list[int] | None, num_samples: int) -> Iterator[tuple[int, int]]:
        if ends is not None:
            yield from zip([0, *ends[:-1]], ends, strict=True)
            return
        size = self._loader.batch_size or 1
        for start in range(0, num_samples, size):
            if start + size <= num_samples or not self._loader.drop_last:
                yield start, min(start + size, num_samples)
