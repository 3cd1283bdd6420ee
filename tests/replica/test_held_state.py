"""The optimizer's state while the run keeps it: nothing is read or written unnoticed."""

import copy
import operator
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch

from paceline.errors import ConfigError
from paceline.replica.held_state import HeldState

ROW = {"momentum_buffer": torch.ones(2)}


@pytest.mark.parametrize(
    "access",
    [
        lambda state: state["weight"],
        lambda state: operator.setitem(state, "weight", ROW),
        lambda state: operator.ior(state, {"weight": ROW}),
        lambda state: state | {},
        lambda state: {} | state,
        lambda state: list(reversed(state)),
        lambda state: list(state),
        lambda state: state.update({"weight": ROW}),
        bool,
        len,
    ],
)
def test_every_access_says_how_to_read_the_state(access: Callable[[Any], object]) -> None:
    state = HeldState(dict)
    with pytest.raises(ConfigError, match=r"read it by optimizer\.state_dict"):
        access(state)


def test_a_copy_has_the_actual_state() -> None:
    copied = copy.deepcopy(HeldState(lambda: {"weight": ROW}))  # type: ignore[dict-item]  # any key
    assert type(copied) is defaultdict
    assert torch.equal(copied["weight"]["momentum_buffer"], torch.ones(2))
