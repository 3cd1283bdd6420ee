"""A script, run small: one worker with whole batches, and several that share them.

Every worker runs ``in_worker.py``, which runs the script. This module must not know why a
difference comes about.
"""

import io
import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..errors import ConfigError
from ..porting.porting import check_script
from ..program import ScriptProgram
from ..system.interpreter import kept_interpreter
from .cases import (
    CLOSE,
    UPDATES,
    Compared,
    Dtype,
    FirstUpdate,
    Verifiable,
    VerifyCase,
    first_update,
    run_small,
    sizes_of,
)
from .layers import BreakingLayer
from .plain import largest_difference

IN_WORKER = f"{__package__}.in_worker"
FOUND = "found.pt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request to the main worker of a script; it is sent as JSON.

    Args:
        case: whose batches and number format the script gets.
        folder: where the model's state is put.
        looks: whether to look for layers that break.
    """

    case: VerifyCase
    folder: str
    looks: bool = False

    def write(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> "Asked":
        values = json.loads(text)
        case = values.pop("case")
        return cls(case=VerifyCase(**{**case, "frozen": tuple(case["frozen"])}), **values)


class ScriptSubject(Verifiable):
    """A script with Paceline's lines; several workers are compared with one.

    Args:
        args: the script's own.

    Raises:
        ConfigError: there is no such script, or it has no such lines.
    """

    def __init__(self, path: Path, args: Sequence[str] = ()) -> None:
        if not path.is_file():
            raise ConfigError(f"there is no script {path}; name a file, or a task")
        check_script(ScriptProgram(path=str(path)))
        self.name = path.stem
        self._path, self._args = path, tuple(args)

    def compare(self, case: VerifyCase) -> Compared:
        alone, first, sizes = self._run(case, 1)
        shared, update, _ = self._run(case, case.workers)
        name, difference = largest_difference(alone["state"], shared["state"])
        rounding = 0.0
        if case.dtype == "float32" and CLOSE < difference < math.inf:
            nudged, *_ = self._run(replace(case, is_nudged=True), 1)
            made = largest_difference(alone["state"], nudged["state"])[1]
            rounding = made if made < math.inf else 0.0
        return Compared(
            sizes=sizes, has_own_batches=alone["own"],
            name=name, difference=difference, alone=first, shared=update, rounding=rounding,
        )  # fmt: skip

    def breaking_layers(self, case: VerifyCase) -> tuple[BreakingLayer, ...]:
        found, *_ = self._run(case, 1, looks=True)
        return tuple(found["layers"])

    def draws(self, case: VerifyCase) -> bool:
        found, *_ = self._run(case, 1)
        return bool(found["draws"])

    def _run(
        self, case: VerifyCase, workers: int, *, looks: bool = False
    ) -> tuple[Any, FirstUpdate, tuple[int, ...]]:
        """What the main worker has written, the first update, and the samples of each update."""
        with tempfile.TemporaryDirectory(prefix="paceline-") as folder, _as_it_was(case.dtype):
            asked = Asked(case=case, folder=folder, looks=looks)
            args = (asked.write(), str(self._path), *self._args)
            program = ScriptProgram(path=IN_WORKER, args=args, is_module=True)
            ran = run_small(program, workers, Path(folder), updates=UPDATES)
            found = Path(folder) / FOUND
            if not found.exists():
                raise ConfigError(
                    f"{self._path} ended without pace.prepare(model, optimizer, loader), so there "
                    "is nothing to compare; add the lines that paceline launch --check prints"
                )
            left, sizes = torch.load(found, weights_only=False), sizes_of(ran)
            if not (sizes and left["has_moved"]):
                done = "made no update" if not sizes else f"{len(sizes)} updates moved no parameter"
                raise ConfigError(
                    f"{self._path}: {done}, which proves nothing; give it the arguments with which "
                    "it trains, after --, and a learning rate > 0 from its first updates on"
                )
            return left, first_update(ran), sizes


@contextmanager
def _as_it_was(dtype: Dtype) -> Iterator[None]:
    """Make new tensors in this number format; undo what the script changes in the process."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with kept_interpreter(), redirect_stdout(io.StringIO()):
            yield
    finally:
        torch.set_default_dtype(before)
