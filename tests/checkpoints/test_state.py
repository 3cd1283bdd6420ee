"""State kept by members, as JSON and tensors: it comes back unchanged, or is refused by name."""

import contextlib
import json
import math
from collections import Counter, deque, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save
from torch import Tensor, nn

from paceline.checkpoints.state import model_file, pack, save_model, save_tensors, unpack
from paceline.errors import ConfigError, LinkError, PacelineError
from paceline.script.member_state import extra_states

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers(), inner)
        | st.builds(Counter, st.lists(st.integers()))
    ),
    max_leaves=20,
)


def back_and_forth(value: object) -> Any:
    tensors: dict[str, Tensor] = {}
    return unpack(json.loads(json.dumps(pack(value, tensors), allow_nan=False)), tensors)


@given(PLAIN)
def test_plain_values_come_back_unchanged(value: object) -> None:
    back = back_and_forth(value)
    assert back == value
    assert type(back) is type(value)


def test_a_bounded_deque_comes_back_and_a_named_tuple_is_refused() -> None:
    memory = back_and_forth({"memory": deque([(1, 2.0), (3, 4.0)], maxlen=2)})["memory"]
    memory.append((5, 6.0))
    assert memory == deque([(3, 4.0), (5, 6.0)], maxlen=2)
    transition = namedtuple("Transition", "state action")
    with pytest.raises(ConfigError, match=r"cannot hold memory\[0\]: it is a Transition; numbers"):
        pack([transition(1, 2)], {}, "memory")


def test_numbers_that_json_lacks_come_back() -> None:
    assert back_and_forth([math.inf, -math.inf]) == [math.inf, -math.inf]
    assert math.isnan(back_and_forth(math.nan))
    assert back_and_forth(np.float64(0.1)) == 0.1
    array = np.arange(6, dtype=np.uint32).reshape(2, 3)
    assert (back_and_forth({"x": array})["x"] == array).all()


def test_tensors_keep_their_dtype_and_bits() -> None:
    values = [torch.randn(3, 4, dtype=torch.float64).t(), torch.tensor(3), torch.ones(2).bfloat16()]
    for value, back in zip(values, back_and_forth(values), strict=True):
        assert back.dtype == value.dtype
        assert torch.equal(back, value)


KINDS = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
    torch.bfloat16, torch.float32, torch.float64,
)  # fmt: skip


def of_all_kinds() -> nn.Module:
    module = nn.Module()
    for number, kind in enumerate(reversed(KINDS)):
        value = (torch.arange(6).reshape(2, 3) % 2).to(kind).t()
        module.register_buffer(f"b{number}_é", value)
    module.register_buffer("number", torch.tensor(3.0))
    module.register_buffer("none", torch.zeros(0, 4))
    module.inner = nn.Linear(3, 2)
    return module


def test_a_model_file_is_what_safetensors_writes() -> None:
    module = of_all_kinds()
    state = {name: value.contiguous() for name, value in module.state_dict().items()}
    assert model_file(module) == save(state)


def test_a_model_file_has_the_modes_of_other_new_files(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    save_model(of_all_kinds(), tmp_path / "model.safetensors")
    modes = [path.stat().st_mode for path in tmp_path.iterdir()]
    assert modes[0] == modes[1]


def test_tensors_are_read_one_at_a_time_and_a_failure_leaves_no_file(tmp_path: Path) -> None:
    state = dict(of_all_kinds().state_dict())
    shapes = {name: torch.empty_like(value, device="meta") for name, value in state.items()}
    save_tensors(shapes, state.__getitem__, tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == model_file(of_all_kinds_with(state))

    def fail(name: str) -> Tensor:
        if name == "none":
            raise LinkError("a worker is gone")
        return state[name]

    with pytest.raises(LinkError):
        save_tensors(shapes, fail, tmp_path / "a")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    with pytest.raises(ConfigError, match=r"x is torch\.complex128, which"):
        save_tensors({"x": torch.zeros(1, dtype=torch.complex128)}, fail, tmp_path / "b")
    assert not (tmp_path / "b").exists()


def of_all_kinds_with(state: dict[str, Tensor]) -> nn.Module:
    module = of_all_kinds()
    module.load_state_dict(state)
    return module


def schedulers() -> dict[str, Any]:
    module = torch.optim.lr_scheduler
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1, momentum=0.9)
    return {
        "multistep": module.MultiStepLR(optimizer, [2, 4]),
        "onecycle": module.OneCycleLR(optimizer, max_lr=1.0, total_steps=10),
        "plateau": module.ReduceLROnPlateau(optimizer),
        "cosine": module.CosineAnnealingWarmRestarts(optimizer, 3),
        "sequential": module.SequentialLR(
            optimizer, [module.ConstantLR(optimizer), module.ExponentialLR(optimizer, 0.9)], [3]
        ),
    }


@pytest.mark.parametrize("name", schedulers())
def test_the_state_of_torchs_schedulers_can_be_kept(name: str) -> None:
    state = schedulers()[name].state_dict()
    fresh = schedulers()[name]
    fresh.load_state_dict(back_and_forth(state))
    assert {k: v for k, v in fresh.state_dict().items() if k != "_schedulers"} == {
        k: v for k, v in state.items() if k != "_schedulers"
    }


class Own:
    pass


@pytest.mark.parametrize(
    "value", [Own(), print, b"bytes", {1, 2}, np.array(["x"]), np.add, np.longdouble(1)]
)
def test_an_unsupported_value_is_refused_by_name(value: object) -> None:
    with pytest.raises(ConfigError, match=r"cannot hold ema\['deep'\]\[0\]: it is a "):
        pack({"deep": [value]}, {}, "ema")


@pytest.mark.parametrize(
    "wrap",
    [
        lambda inner: [inner], lambda inner: (inner,), lambda inner: {"a": inner},
        lambda inner: deque([inner]), lambda inner: [{"a": inner}],
    ],
)  # fmt: skip
def test_a_value_nested_too_deep_to_be_read_is_not_written(wrap: Callable[[Any], Any]) -> None:
    def nest(value: Any) -> None:
        for _ in range(200):
            value = wrap(value)
            assert unpack(pack(value, {}, "ema"), {}) == value

    with pytest.raises(ConfigError, match=r"a checkpoint cannot hold ema.*nested too deep"):
        nest(1)


def test_a_value_that_contains_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(ConfigError, match="nested too deep"):
        pack(value, {}, "ema")


BROKEN = st.recursive(
    st.none() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(("dict", "tuple", "tensor", "float", "counter", "array", "x")),
            inner,
            max_size=2,
        )
    ),
)


@given(BROKEN)
def test_arbitrary_json_is_refused_or_read_as_plain_values(value: Any) -> None:
    with contextlib.suppress(PacelineError):
        unpack(value, {"0": torch.ones(2)})


def test_unsupported_extra_state_is_refused_by_name() -> None:
    class Odd(nn.Linear):
        def get_extra_state(self) -> object:
            return object()

        def set_extra_state(self, state: object) -> None:
            pass

    model = nn.Sequential(nn.Linear(1, 1), Odd(1, 1))
    assert [name for name, _ in extra_states(model, is_kept=False)] == ["1"]
    with pytest.raises(ConfigError, match=r"the extra state of 1 \(Odd.get_extra_state\)"):
        list(extra_states(model, is_kept=True))
    assert not [*extra_states(nn.Linear(1, 1), is_kept=True)]
