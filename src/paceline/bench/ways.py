"""The ways in which one model can be run, as written or through a compiler; and one, timed.

A way is a name and a function: model and example in, function out. All it does to get there is
part of its first call. The files that some of them write go into a folder that is thrown away.

    TimedWay   prepare() --> block(n), block(n) ... --> finish()       in a process of its own

This module must not know how ways are compared.
"""

import gc
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from ..exports import FORMATS
from ..exports.formats import Run
from ..exports.subject import find_subject
from .clock import elapsed_s, synchronize
from .device import peak_bytes, reset_peak

SETTLING_CALLS = 5
"""TorchScript optimises in its first calls, too; after these a way has settled."""

Way = Callable[[nn.Module, Sequence[Tensor], Path], Run]


def _eager(model: nn.Module, inputs: Sequence[Tensor], folder: Path) -> Run:
    return model


def _compiled(model: nn.Module, inputs: Sequence[Tensor], folder: Path) -> Run:
    if inputs[0].device.type == "cpu":
        from ..exports.formats import check_compiler

        check_compiler()
    torch._dynamo.reset()
    compiled: Run = torch.compile(model)
    return compiled


def _by_file(name: str) -> Way:
    """A way that writes the model in a format and loads it, as another program would."""

    def way(model: nn.Module, inputs: Sequence[Tensor], folder: Path) -> Run:
        form = FORMATS[name]
        path = folder / f"model{form.suffix}"
        # A batch of one is a special case to torch.export: the example has two.
        pair = tuple(torch.cat([value[:1], value[:1]]) for value in inputs)
        form.write(model, pair, path, is_batch_fixed=False)
        return form.load(path)

    return way


WAYS: Mapping[str, Way] = {
    "eager": _eager,
    "script": _by_file("torchscript"),
    "trace": _by_file("torchscript-trace"),
    "compile": _compiled,
    "export": _by_file("export"),
    "aoti": _by_file("aoti"),
}
"""As ``--ways`` takes them; the first is what the others are compared with."""


class TimedWay:
    """Holds the model and runs blocks of calls.

    Args:
        way: one of WAYS.
        subject: what `find_subject` takes.
        batch_size: samples a call, >= 1.
        device: "cpu", "cuda", ...
        threads: that torch uses, >= 1.
    """

    def __init__(self, way: str, subject: str, batch_size: int, device: str, threads: int) -> None:
        torch.set_num_threads(threads)
        result = find_subject(subject)
        self._way = WAYS[way]
        self._is_counted = way == "compile"
        self._device = torch.device(device)
        self._model = result.model.to(self._device)
        self._make = result.inputs
        self._inputs = tuple(one.to(self._device) for one in result.inputs(batch_size))
        self._batch_size = batch_size
        self._folder = tempfile.TemporaryDirectory(prefix="paceline-ways-")
        self._run: Run | None = None

    def prepare(self) -> Mapping[str, object]:
        """Build the way, make its first calls, and compare its output with the model's."""
        with torch.no_grad():
            synchronize()
            reset_peak(self._device)
            start_s = time.perf_counter()
            self._run = self._way(self._model, self._inputs, Path(self._folder.name))
            output = self._run(*self._inputs)
            synchronize()
            first_s = time.perf_counter() - start_s
            for _ in range(SETTLING_CALLS - 1):
                self._run(*self._inputs)
            synchronize()
            settled_s = time.perf_counter() - start_s
            wanted = self._model(*self._inputs)
        gc.collect()
        gc.freeze()  # what a compiler made is not looked through again while calls are timed
        return {
            "first_call_s": first_s,
            "settled_s": settled_s,
            "max_difference": (output - wanted).abs().max().item(),
        }

    def block(self, count: int) -> Mapping[str, object]:
        """Make ``count`` calls; their seconds."""
        run, inputs = self._run, self._inputs
        assert run is not None
        with torch.no_grad():
            run(*inputs)  # what cooled down while others had their turn
            return {"seconds": elapsed_s(lambda: run(*inputs), count)}

    def finish(self) -> Mapping[str, object]:
        """Peak memory so far; then two other batch sizes: the recompilations they cause."""
        peak = peak_bytes(self._device)
        counters = torch._dynamo.utils.counters  # of torch.compile, in this process
        before = int(counters["stats"]["unique_graphs"])
        seconds = []
        run = self._run
        assert run is not None
        with torch.no_grad():
            for batch_size in (self._batch_size + 1, self._batch_size + 2):
                inputs = tuple(one.to(self._device) for one in self._make(batch_size))
                seconds.append(elapsed_s(lambda inputs=inputs: run(*inputs)))  # type: ignore[misc]  # mypy infers no default of a lambda
        counted = {
            "graph_breaks": int(sum(counters["graph_break"].values())),
            "recompiles": int(counters["stats"]["unique_graphs"]) - before,
        }
        return {
            "peak_bytes": peak, "other_batches_s": seconds, **(counted if self._is_counted else {})
        }  # fmt: skip
