"""The best models of a run by one metric: files in its folder, and which is which in best.json.

    evaluation at a version -> better than one that is kept? -> best-VERSION.safetensors
        -> best.json: the model to come -> best.safetensors -> best.json

If a worker is killed in between, the next one sees from the file whether the new model arrived, so
no better model is replaced. In a loop over updates any worker may evaluate, so the list of kept
models is stored in the folder and changed only while the folder is locked. This module must not
know who evaluates, nor what a model is made of.
"""

import fcntl
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from ..core.stats import better_of
from ..errors import ConfigError, FileError
from ..fields import count, real
from ..stopping import sign_of
from ..system.files import OpenFolder, read_text

INDEX, BEST = "best.json", "best.safetensors"
_MOST_BYTES = 1 << 20


class Kept(NamedTuple):
    """A kept model; a larger ``worth`` is better."""

    version: int
    worth: float


class BestModels:
    """The best models of one run.

    Args:
        folder: folder of the models.
        identity: identity of that folder; None: the folder and its models are not the run's own.
        name: name of the metric; None: the accuracy, or the loss if there is no accuracy.
        most: number of models to keep, >= 1.
        mode: ``max`` or ``min``; None: chosen by the metric's name.

    Attributes:
        has_measured: whether any evaluation measured that metric.
    """

    def __init__(
        self,
        folder: Path,
        identity: Sequence[int] | None,
        name: str | None = None,
        most: int = 1,
        mode: str | None = None,
    ) -> None:
        self._folder = folder
        self._identity = identity
        self.name = name
        self._most = most
        self._sign = 1 if name is None else sign_of(name, mode)
        self._own: list[Kept] = []
        self.has_measured = False

    def look(
        self, totals: dict[str, tuple[float, float]], version: int, data: Callable[[], bytes]
    ) -> None:
        """Keep the model if it is good enough.

        Args:
            data: returns the bytes of its file.

        Raises:
            FileError: the folder cannot be opened or written.
        """
        worth = self._worth(totals)
        if worth is None or not math.isfinite(worth):
            return
        with self._locked() as place:
            kept = self._read(place)
            earlier = next((model for model in kept if model.version == version), None)
            if earlier is not None and earlier.worth >= worth:
                return  # another worker evaluated this version; the best local weights count
            others = [model for model in kept if model is not earlier]
            ranked = sorted(
                [*others, Kept(version, worth)], key=lambda model: (-model.worth, model.version)
            )
            ranked, dropped = ranked[: self._most], ranked[self._most :]
            if Kept(version, worth) in dropped:
                return
            self._write(place, kept, ranked, version, data())
            for model in dropped:
                place.remove_file(_file(model.version))

    def _worth(self, totals: dict[str, tuple[float, float]]) -> float | None:
        """Return the metric, larger is better; None: it was not measured."""
        if self.name is None:
            return better_of(totals)
        total, num_samples = totals.get(self.name, (0.0, 0.0))
        if not num_samples:
            return None
        self.has_measured = True
        return self._sign * total / num_samples

    @contextmanager
    def _locked(self) -> Iterator[OpenFolder]:
        with closing(OpenFolder.open(self._folder, self._identity)) as place:
            fcntl.flock(place.fd, fcntl.LOCK_EX)  # until the folder is closed
            yield place

    def _read(self, place: OpenFolder) -> list[Kept]:
        """Return the kept models, best first; complete the index if its writer was killed."""
        if self._identity is None or not place.has(INDEX):
            return self._own
        try:
            with place.read(INDEX) as file:
                index = json.loads(read_text(file, _MOST_BYTES))
            kept = [Kept(count(row["version"]), real(row["worth"])) for row in index["models"]]
            metric = index.get("metric", self.name)
            comes = index.get("comes")
            if comes and comes["instead_of"] != _identity_of_best(place):
                coming = Kept(count(comes["version"]), real(comes["worth"]))
                kept = [coming, *(model for model in kept if model.version != coming.version)]
                kept = kept[: self._most]
        except (FileError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(
                f"{place.path / INDEX} is damaged ({error!r:.100}), so the best models are "
                "unknown: move it away"
            ) from None
        if metric != self.name:
            raise ConfigError(
                f"{place.path / INDEX} lists the best models by {_named(metric)}, but this run "
                f"keeps them by {_named(self.name)}, which cannot be compared: move it away, or "
                "use the same metric"
            )
        if comes:  # a worker was killed while it wrote this model
            self._list(place, kept)
        return kept

    def _write(
        self, place: OpenFolder, before: list[Kept], kept: list[Kept], version: int, data: bytes
    ) -> None:
        """Write the new model first, then the index that lists it."""
        if self._most > 1:
            place.replace(_file(version), data, is_synced=True)
        if kept[0].version == version:
            self._list(place, before, kept[0])
            place.replace(BEST, data, is_synced=True)
        self._list(place, kept)
        self._own = kept

    def _list(self, place: OpenFolder, kept: list[Kept], comes: Kept | None = None) -> None:
        """Write the index: the kept models, and ``comes``, which is about to be the best file."""
        rows: list[dict[str, Any]] = [
            {
                "version": model.version,
                "worth": model.worth,
                "file": BEST if self._most == 1 else _file(model.version),
            }
            for model in kept
        ]
        index: dict[str, Any] = {"metric": self.name, "models": rows}
        if comes is not None:
            index["comes"] = {**comes._asdict(), "instead_of": _identity_of_best(place)}
        place.replace(INDEX, json.dumps(index, indent=1).encode())


def _identity_of_best(place: OpenFolder) -> list[int]:
    """Return the inode, size and time of the best file; empty: there is none."""
    try:
        status = os.stat(BEST, dir_fd=place.fd, follow_symlinks=False)
    except FileNotFoundError:
        return []
    return [status.st_ino, status.st_size, status.st_mtime_ns]


def _named(metric: str | None) -> str:
    return "accuracy or loss" if metric is None else repr(metric)


def is_of_kept(name: str) -> bool:
    """Return whether a file of this name is one of several kept models."""
    version = name.removeprefix("best-").removesuffix(".safetensors")
    return version.isdecimal() and name == _file(int(version))


def _file(version: int) -> str:
    return f"best-{version}.safetensors"
