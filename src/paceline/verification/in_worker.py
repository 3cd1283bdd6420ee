"""Runs a user's script in a worker of a verification.

    connect -> prepare is replaced -> the script, as __main__ -> the state of its models

Its models get the number format of the case, its loader small batches whose samples are each drawn
once. The script ends when the updates of the case are made, or its epochs are over: what follows
(an evaluation, writing a file) is not run. This module must not know runs.
"""

import copy
import random
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset

from paceline.data.feed import apply
from paceline.errors import ConfigError
from paceline.replica.layers import set_modes
from paceline.replica.seeding import kept_random_state, seed_all
from paceline.script.worker import Pace, current_pace
from paceline.verification.cases import cast, freeze, nudge
from paceline.verification.ending import EndingLoader, end_with_loop, end_with_run, run_for_updates
from paceline.verification.layers import breaking_layers
from paceline.verification.of_script import FOUND, Asked
from paceline.verification.plain import state_of


class SeededSamples(Dataset[Any]):
    """A data set whose samples are the same at each draw, also augmented ones."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: Any) -> Any:
        with kept_random_state():
            seed_all(index if isinstance(index, int) else 0)
            return self._data[index]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._data, name)


class WatchedLoader(EndingLoader):
    """A prepared loader that notes whether the script draws random numbers for a batch."""

    watched: "WatchedScript"

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            before = _random_state()
            yield batch
            if torch.is_grad_enabled():  # else it is an evaluation
                self.watched.draws = self.watched.draws or before != _random_state()


def _random_state() -> tuple[Any, bytes]:
    """The random state of Python and of torch; a draw moves one of them."""
    return random.getstate(), torch.get_rng_state().numpy().tobytes()


class WatchedScript:
    """A script's ``pace``, of which two methods are replaced.

    Args:
        pace: what ``connect`` returns, to the script as well.

    Attributes:
        draws: whether a step has drawn random numbers, in a layer or outside the model.
    """

    def __init__(self, pace: Pace, asked: Asked) -> None:
        self.pace, self._asked = pace, asked
        self.draws = False
        self._models: list[nn.Module] = []
        self._has_own_batches = False
        self._call: tuple[nn.Module, Any, Any, dict[nn.Module, bool]] | None = None
        """The first training call: its model, arguments, and the mode of each module."""
        self._prepare = pace.prepare
        pace.prepare = self.prepare  # type: ignore[method-assign]  # of this worker alone: it is watched
        pace.epochs = end_with_loop(pace.epochs)  # type: ignore[method-assign]  # the same

    def prepare(self, *objects: Any, batch: str | None = None, **options: Any) -> Any:
        """Prepare with ``batch="global"``, whatever the script says."""
        if self._models:
            return self._prepare(*objects, batch=batch, **options)
        self._models = [item for item in objects if isinstance(item, nn.Module)]
        if not any(isinstance(item, DataLoader) for item in objects):
            raise ConfigError(
                "verify needs a script whose prepare() is given a loader: each number of "
                "pace.updates is a mini-batch of one worker, which workers do not share"
            )
        for model in self._models:
            model.to(getattr(torch, self._asked.case.dtype))
            freeze(model, self._asked.case.frozen)
            if self._asked.case.is_nudged:
                nudge(model)
            model.register_forward_pre_hook(self._called, with_kwargs=True)
        changed = [self._small(each) if isinstance(each, DataLoader) else each for each in objects]
        weights = [weight for model in self._models for weight in model.parameters()]
        self._first = [(weight, weight.detach().clone()) for weight in weights]
        made = self._prepare(*changed, batch="global", **options)
        end_with_run(self.pace, made, WatchedLoader)
        for item in made:
            if isinstance(item, WatchedLoader):
                item.watched = self
        return made

    def write(self) -> None:
        """Write the final state of the models into the folder, once for all workers."""
        if not self._models or not self.pace.is_main:
            return
        prefixed = {
            f"{self._prefix(number)}{name}": value
            for number, model in enumerate(self._models)
            for name, value in state_of(model).items()
        }
        layers = self._layers() if self._asked.looks else ()
        found = {
            "state": prefixed, "own": self._has_own_batches, "layers": layers, "draws": self.draws,
            "has_moved": any(not torch.equal(weight, before) for weight, before in self._first),
        }  # fmt: skip
        torch.save(found, Path(self._asked.folder) / FOUND)

    def _layers(self) -> Any:
        if self._call is None:
            return ()
        model, arguments, options, modes = self._call
        set_modes(list(modes), list(modes.values()))
        return breaking_layers(model, arguments, options, self._asked.case.workers)

    def _prefix(self, number: int) -> str:
        return f"{number}." if len(self._models) > 1 else ""

    def _called(self, model: nn.Module, arguments: Any, options: Any) -> Any:
        """Before a forward pass, cast its inputs to the number format of the case."""
        change = partial(cast, self._asked.case.dtype)
        arguments, options = apply(change, arguments), apply(change, options)
        if self._call is None and model.training and torch.is_grad_enabled():
            modes = {module: module.training for module in model.modules()}
            keep = torch.Tensor.clone
            self._call = model, apply(keep, arguments), apply(keep, options), modes
        return arguments, options

    def _small(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """The loader with the batches of the case, in this process.

        Batches of a batch sampler of the script's own stay as they are.

        Raises:
            ConfigError: it reads a stream.
        """
        if isinstance(loader.dataset, IterableDataset):
            raise ConfigError(
                "verify needs a loader over a data set with a length: the parts of a stream's "
                "batches must be equal, so uneven ones cannot be tried"
            )
        changes: dict[str, Any] = {"dataset": SeededSamples(loader.dataset), "num_workers": 0}
        changes |= {"prefetch_factor": None, "persistent_workers": False}
        own: Any = loader.batch_sampler
        if type(own) is BatchSampler:
            size = self._asked.case.batch_size(own.batch_size)
            changes["batch_sampler"] = BatchSampler(own.sampler, size, own.drop_last)
            if loader.batch_size is not None:
                changes["batch_size"] = size
        elif own is not None:
            self._has_own_batches = True
        made = copy.copy(loader)
        for name, value in changes.items():
            object.__setattr__(
                made, name, value
            )  # DataLoader.__setattr__ refuses that after __init__
        return made


def main() -> None:
    """Run the script that is named after the request."""
    asked, script, *args = sys.argv[1:]
    watched = WatchedScript(current_pace(), Asked.read(asked))
    run_for_updates(script, args)
    watched.write()


if __name__ == "__main__":
    main()
