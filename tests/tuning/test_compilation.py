"""Compiled code runs only in training calls of the usual size."""

from typing import Any

import pytest
import torch

from paceline.errors import ConfigError
from paceline.tuning.candidates import Compilation
from paceline.tuning.compilation import compile_model
from subjects import SIZE, batch, network, subject


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes the compiled code was called with; torch compiles nothing."""
    results: list[int] = []

    def compiled(function: Any, *, mode: str, dynamic: bool) -> Any:
        assert (mode, dynamic) == ("default", False)

        def run(inputs: Any) -> Any:
            results.append(len(inputs))
            return function(inputs)

        return run

    monkeypatch.setattr(torch, "compile", compiled)
    return results


def test_evaluation_and_short_last_batch_run_eagerly(calls: list[int]) -> None:
    model, (inputs, _) = network(), batch()
    compile_model(model, "default", frozenset({SIZE}))
    model(inputs)
    model(inputs[:3])
    with torch.no_grad():
        model(inputs)
    model.eval()(inputs)
    assert calls == [SIZE]


def test_compiling_a_model_twice_is_refused(calls: list[int]) -> None:
    objects = subject().objects
    Compilation().apply(objects, "default")
    with pytest.raises(ConfigError, match="already compiled; leave --compile out"):
        Compilation().apply(objects, "default")


def test_samples_of_a_dict_are_counted(calls: list[int]) -> None:
    class OfDict(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network()

        def forward(self, given: Any) -> Any:
            return self.inner(given["x"])

    model, (inputs, _) = OfDict(), batch()
    compile_model(model, "default", frozenset({SIZE}))
    model({"x": inputs})
    model({"x": inputs[:3]})
    assert calls == [1]  # with a dict of one tensor
