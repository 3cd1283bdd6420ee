"""The ways to run a model, eager or through a compiler, and a timer for one way.

A way is a name and a function that turns a model and example inputs into a callable. The time for
that counts in its first call. Some ways write files, into a temporary folder.

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
"""TorchScript also optimises in its first calls; after these calls a way has settled."""

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
    """Return a way that exports the model in a format and loads the file."""

    def way(model: nn.Module, inputs: Sequence[Tensor], folder: Path) -> Run:
        form = FORMATS[name]
        path = folder / f"model{form.suffix}"
        # torch.export specialises on a batch of one, so the example has two samples.
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
"""By the names of ``--ways``; the others are compared with the first."""


class TimedWay:
    """Builds one way of running a model and times blocks of calls.

    Args:
        way: one of WAYS.
        subject: as `find_subject` takes it.
        batch_size: samples a call, >= 1.
        device: "cpu", "cuda", ...
        threads: that torch uses, >= 1.
    """

    def __init__(self, way: str, subject: str, batch_size: int, device: str, threads: int) -> None:
        torch.set_num_threads(threads)
        found_subject = find_subject(subject)
        self._way = WAYS[way]
        self._is_counted = way == "compile"
        self._device = torch.device(device)
        self._model = found_subject.model.to(self._device)
        self._make_inputs = found_subject.inputs
        self._inputs = tuple(value.to(self._device) for value in found_subject.inputs(batch_size))
        self._batch_size = batch_size
        self._folder = tempfile.TemporaryDirectory(prefix="paceline-ways-")
        self._run: Run | None = None

    def prepare(self) -> Mapping[str, object]:
        """Build the way and make its first calls.

        Returns:
            Seconds of the first call and until it settled; largest difference from the model.
        """
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
            expected = self._model(*self._inputs)
        gc.collect()
        gc.freeze()  # timed calls do not collect the compiler's objects
        return {
            "first_call_s": first_s,
            "settled_s": settled_s,
            "max_difference": (output - expected).abs().max().item(),
        }

    def block(self, count: int) -> Mapping[str, object]:
        """Return the seconds of ``count`` calls, after one untimed call."""
        run, inputs = self._run, self._inputs
        assert run is not None
        with torch.no_grad():
            run(*inputs)  # warm the caches again after the other ways' turns
            return {"seconds": elapsed_s(lambda: run(*inputs), count)}

    def finish(self) -> Mapping[str, object]:
        """Run two other batch sizes.

        Returns:
            Peak memory before them, the seconds of each, and what torch.compile recompiled.
        """
        peak = peak_bytes(self._device)
        counters = torch._dynamo.utils.counters  # of torch.compile, in this process
        before = int(counters["stats"]["unique_graphs"])
        seconds = []
        run = self._run
        assert run is not None
        with torch.no_grad():
            for batch_size in (self._batch_size + 1, self._batch_size + 2):
                inputs = tuple(value.to(self._device) for value in self._make_inputs(batch_size))
                seconds.append(elapsed_s(lambda inputs=inputs: run(*inputs)))  # type: ignore[misc]  # mypy infers no default of a lambda
        counts = {
            "graph_breaks": int(sum(counters["graph_break"].values())),
            "recompiles": int(counters["stats"]["unique_graphs"]) - before,
        }
        return {
            "peak_bytes": peak, "other_batches_s": seconds, **(counts if self._is_counted else {})
        }  # fmt: skip
