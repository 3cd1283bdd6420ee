"""A loop over a stream of Hugging Face ``datasets``, or with the torchdata loader.

    python public_streams.py FOLDER {JSON}        results go to FOLDER/result-N.pt

In float64; the plain loop over the same mini-batches is `twin`.
"""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

import streamed
from struck import has_stepped, wait_for_kills

SIZE, SHARDS, BATCH_SIZE, BUFFER, EPOCHS = 96, 4, 8, 20, 2
NUM_UPDATES = EPOCHS * SIZE // BATCH_SIZE


def rows(shards: list[int]) -> Iterator[dict[str, Any]]:
    for shard in shards:
        for number in range(shard * SIZE // SHARDS, (shard + 1) * SIZE // SHARDS):
            yield {"number": number}


def with_sample(row: dict[str, Any]) -> dict[str, Any]:
    inputs, targets = streamed.sample(row["number"])
    return {"inputs": inputs.tolist(), "targets": targets.tolist()}


def collate(samples: list[dict[str, Any]]) -> tuple[Tensor, Tensor]:
    inputs, targets = (
        torch.tensor([one[name] for one in samples], dtype=torch.float64)
        for name in ("inputs", "targets")
    )
    return inputs, targets


def stream_of(kind: str) -> Any:
    """A stream that is "mapped", "shuffled", "batched" (a map of batches) or "interleaved"."""
    from datasets import IterableDataset, interleave_datasets

    def one(shards: list[int]) -> Any:
        return IterableDataset.from_generator(rows, gen_kwargs={"shards": shards})

    if kind == "interleaved":
        parts = [one([0, 1]).shuffle(seed=3, buffer_size=BUFFER), one([2, 3])]
        return interleave_datasets(parts).map(with_sample)
    stream = one(list(range(SHARDS)))
    if kind == "shuffled":
        stream = stream.shuffle(seed=3, buffer_size=BUFFER)
    if kind == "batched":
        return stream.map(many, batched=True, batch_size=5)
    return stream.map(with_sample)


def many(some: dict[str, list[Any]]) -> dict[str, list[Any]]:
    found = [with_sample({"number": number}) for number in some["number"]]
    return {name: [one[name] for one in found] for name in ("inputs", "targets")}


def loader_of(options: dict[str, Any], batch_size: int = BATCH_SIZE) -> Any:
    kind = options["kind"]
    num_workers = options.get("num_workers", 0)
    if kind.startswith("torchdata"):
        from torchdata.stateful_dataloader import StatefulDataLoader

        if kind == "torchdata":
            return StatefulDataLoader(
                streamed.Stateful(SIZE), batch_size=batch_size, num_workers=num_workers
            )
        stream = stream_of(kind.partition(" ")[2])
        return StatefulDataLoader(
            stream, batch_size=batch_size, num_workers=num_workers, collate_fn=collate
        )
    return DataLoader(
        stream_of(kind), batch_size=batch_size, num_workers=num_workers, collate_fn=collate
    )


def set_epoch(loader: Any, epoch: int) -> None:
    if hasattr(loader.dataset, "set_epoch"):
        loader.dataset.set_epoch(epoch)


def twin(seed: int, parts: int, options: dict[str, Any]) -> streamed.Results:
    """The same in plain PyTorch: update v averages the mini-batches v K to v K + K - 1."""
    from paceline import step_seed

    model, optimizer = streamed.make()
    plain = loader_of({"num_workers": 1, **options}, BATCH_SIZE // parts)
    for epoch in range(EPOCHS):
        set_epoch(plain, epoch)
        batches = list(plain)
        for first in range(0, len(batches), parts):
            some = batches[first : first + parts]
            num_samples = sum(len(inputs) for inputs, _ in some)
            optimizer.zero_grad()
            for number, batch in enumerate(some, first):
                torch.manual_seed(step_seed(seed, epoch, number))
                share = len(batch[0]) / num_samples
                (streamed.loss_of(model, batch) * share).backward()
            optimizer.step()
    return streamed.gather(model)


def train(pace: Any, options: dict[str, Any], folder: Path | None = None) -> streamed.Results:
    model, optimizer = streamed.make()
    loader = loader_of(options)
    model, optimizer, loader = pace.prepare(model, optimizer, loader)
    for epoch in pace.epochs(EPOCHS):
        set_epoch(loader, epoch)
        for batch in loader:
            with pace.step():
                time.sleep(options.get("step_s", 0.0))
                if folder is not None:
                    wait_for_kills(folder, pace.version / NUM_UPDATES)
                optimizer.zero_grad()
                streamed.loss_of(model, batch).backward()
                optimizer.step()
            if folder is not None:
                has_stepped(folder, pace.worker)
            if folder is not None and pace.version >= options.get("say_at", 1 << 60):
                (folder / "is-there").touch()
    return streamed.gather(model)


if __name__ == "__main__":
    import paceline

    folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    pace = paceline.connect()
    torch.save(train(pace, options, folder), folder / f"result-{pace.worker}.pt")
