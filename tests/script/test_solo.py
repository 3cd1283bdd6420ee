"""One worker, no launcher: the same script is refused for the same reasons, but for its memory."""

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from paceline.context import Context
from paceline.errors import ConfigError
from paceline.exchange.solo import SoloExchange
from paceline.script.worker import Pace


def loader() -> DataLoader[tuple[torch.Tensor, ...]]:
    return DataLoader(TensorDataset(torch.rand(8, 2), torch.rand(8, 1)), batch_size=4)


def test_a_lone_worker_refuses_sparse_gradients_by_name() -> None:
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True))
    with pytest.raises(ConfigError, match=r"module '0'.*sparse"):
        Pace(SoloExchange(), Context()).prepare(model, SGD(model.parameters(), lr=1.0), loader())


def test_a_lone_worker_leaves_two_objects_over_one_memory_together() -> None:
    """Plain PyTorch updates both; elsewhere they are refused, since they would come apart."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 1))
    first, second = model.get_parameter("0.weight"), model.get_parameter("1.weight")
    second.data = first.data
    pace = Pace(SoloExchange(), Context())
    model, optimizer, batches = pace.prepare(model, SGD(model.parameters(), lr=1.0), loader())
    for inputs, targets in batches:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    assert first.data_ptr() == second.data_ptr()
    assert torch.equal(first, second)
