"""Optimizer settings restored from a checkpoint: which values may replace them."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from paceline.errors import ConfigError
from paceline.script.member_state import groups_of, set_groups


def optimizer(**settings: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))], **settings)


@pytest.mark.parametrize(
    ("now", "was"),
    [
        (np.float64(0.1), 0.2),  # as np.logspace or a LambdaLR with np.cos leaves it
        (1, 0.5),
        (torch.tensor(0.1), 0.2),
        (0.1, torch.tensor(0.2)),
        (math.inf, math.inf),
        (0.1, 0.0),
    ],
)
def test_a_number_replaces_a_number(now: Any, was: Any) -> None:
    live = optimizer(lr=0.1)
    live.param_groups[0]["lr"] = now
    set_groups(live, [{**groups_of(live)[0], "lr": was, "foreach": True, "betas": (0.8, 0.99)}])
    assert groups_of(live)[0]["lr"] is was
    assert (live.param_groups[0]["foreach"], live.param_groups[0]["betas"]) == (True, (0.8, 0.99))


@pytest.mark.parametrize(
    ("name", "was"),
    [("lr", "0.1"), ("lr", True), ("lr", math.nan), ("betas", (0.9,)), ("amsgrad", 3)],
)
def test_other_values_for_a_number_are_refused_by_name(name: str, was: Any) -> None:
    live = optimizer(lr=0.1)
    with pytest.raises(ConfigError, match=f"the optimizer's {name} is "):
        set_groups(live, [{**groups_of(live)[0], name: was}])
    assert live.param_groups[0]["lr"] == 0.1
