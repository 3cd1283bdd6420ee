"""Compiled code runs only in training calls of the usual size."""

from typing import Any

import pytest
import torch

from paceline.errors import ConfigError
from paceline.tuning.candidates import Compilation
from paceline.tuning.compilation import compile_model, may_compile
from subjects import SIZE, batch, network, subject


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes the compiled code was called with; torch compiles nothing."""
    results: list[int] = []

    def compiled(function: Any, *, dynamic: bool, options: dict[str, Any]) -> Any:
        assert (dynamic, options) == (False, {"fallback_random": True})

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


def test_hook_added_after_the_first_step_is_called(calls: list[int]) -> None:
    model, (inputs, _) = network(), batch()
    seen: list[str] = []
    model.get_submodule("0").register_forward_hook(lambda *_: seen.append("compiled"))
    compile_model(model, "default", frozenset({SIZE}))
    model(inputs)
    handle = model.get_submodule("0").register_forward_hook(lambda *_: seen.append("added"))
    model(inputs)
    assert (calls, seen) == ([SIZE], ["compiled", "compiled", "added"])
    handle.remove()
    model(inputs)
    assert calls == [SIZE, SIZE]


@pytest.mark.skipif(not may_compile(torch.device("cpu")), reason="needs a C++ compiler")
def test_dropout_of_compiled_calls_has_the_masks_of_eager_calls() -> None:
    """In each of several steps from one seed: both draw the same numbers, and as many."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Dropout(0.5))
    inputs = torch.ones(SIZE, 4)

    def outputs() -> list[torch.Tensor]:
        torch.manual_seed(1)
        return [model(inputs).detach() for _ in range(2)]

    expected = outputs()
    compile_model(model, "default", frozenset({SIZE}))
    torch.testing.assert_close(outputs(), expected)
