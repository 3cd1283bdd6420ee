"""One worker, no launcher: the same refusals, except for shared memory."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader, Sampler, Subset, TensorDataset

from paceline.context import Context
from paceline.errors import ConfigError
from paceline.exchange.solo import SoloExchange
from paceline.script.participant import Participant
from paceline.script.worker import Pace, current_pace


def loader() -> DataLoader[tuple[torch.Tensor, ...]]:
    return DataLoader(TensorDataset(torch.rand(8, 2), torch.rand(8, 1)), batch_size=4)


def test_a_participant_sums_and_takes_turns_without_a_loop() -> None:
    participant = Participant(SoloExchange(), Context())
    assert participant.sum(2) == 2.0
    numbers = [[1, -2], [2**53 + 1, -(2**63)]]
    assert participant.sum(torch.tensor(numbers)).tolist() == numbers
    assert participant.sum(torch.tensor([True, False])).tolist() == [1, 0]
    with participant.once() as is_first:
        assert is_first
    participant.stop()
    assert participant.is_stopped
    with pytest.raises(ConfigError, match=r"pace.save\(\) comes after pace.prepare"):
        participant.save()


def test_a_lone_worker_refuses_sparse_gradients_by_name() -> None:
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True))
    with pytest.raises(ConfigError, match=r"module '0'.*sparse"):
        Pace(SoloExchange(), Context()).prepare(model, SGD(model.parameters(), lr=1.0), loader())


def test_a_lone_worker_keeps_two_parameters_in_one_memory() -> None:
    """Plain PyTorch updates both; several workers refuse them, since they would diverge."""
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


@pytest.mark.parametrize(
    ("env", "missing"),
    [
        ({"WORLD_SIZE": "2"}, "RANK and MASTER_ADDR"),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, "MASTER_ADDR"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "MASTER_ADDR"),
        ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, "MASTER_ADDR"),
    ],
)
def test_one_of_several_without_an_address_is_refused(
    env: dict[str, str], missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.script.worker._here.pace", None)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"=2 but did not set {missing}, the address where all"):
        current_pace()


@pytest.mark.parametrize(
    "env",
    [
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"},
        {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PTY_PORT": "40001"},
        {"RANK": "0", "WORLD_SIZE": "1", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"},
    ],
    ids=["a batch script", "a shell in a step", "a torchrun of one in each of two tasks"],
)
def test_one_process_in_a_job_of_slurm_is_alone(
    env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.script.worker._here.pace", None)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert current_pace().is_main


class Unsaid(Sampler[int]):
    """A sampler that does not say how many it has."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


def test_a_sampler_without_a_length_is_accepted_as_by_torch() -> None:
    pace, model = Pace(SoloExchange(), Context()), nn.Linear(2, 1)
    mine = DataLoader(loader().dataset, batch_size=4, sampler=Unsaid())
    _, _, prepared = pace.prepare(model, SGD(model.parameters(), lr=1.0), mine)
    assert [len(inputs) for _ in pace.epochs(1) for inputs, _ in prepared] == [4, 4]
    with pytest.raises(TypeError, match="no len"):
        len(prepared)


def test_an_iterator_draws_its_seed_where_torch_does() -> None:
    """The seed of its workers is drawn there, and the script's next draws are unchanged."""
    model = nn.Linear(2, 1)
    _, _, prepared = Pace(SoloExchange(), Context()).prepare(
        model, SGD(model.parameters(), lr=1.0), loader()
    )
    drawn = []
    for batches in (loader(), prepared):
        torch.manual_seed(3)
        made = iter(batches)
        drawn += [torch.rand(1), next(made)[0].shape, torch.rand(1)]
    assert drawn[:3] == drawn[3:]


def test_attributes_set_on_a_prepared_loader_reach_the_users_loader() -> None:
    pace, model, mine = Pace(SoloExchange(), Context()), nn.Linear(2, 1), loader()
    _, _, prepared = pace.prepare(model, SGD(model.parameters(), lr=1.0), mine)
    assert prepared.batch_size == 4
    assert prepared.dataset is mine.dataset
    prepared.collate_fn = lambda samples: len(samples)
    assert mine.collate_fn is prepared.collate_fn
    assert [*prepared] == [4, 4]
    with pytest.raises(ValueError, match="batch_size attribute should not be set"):
        prepared.batch_size = 8


def test_the_length_of_a_loader_is_that_of_the_current_pass() -> None:
    pace, model = Pace(SoloExchange(), Context()), nn.Linear(2, 1)
    data = Subset(loader().dataset, [0, 1])
    mine = DataLoader(data, batch_size=2)
    _, _, prepared = pace.prepare(model, SGD(model.parameters(), lr=1.0), mine)
    results = []
    for epoch in pace.epochs(range(1, 4)):
        data.indices = range(2 * epoch)
        results.append((len(prepared), len(list(prepared))))
    assert results == [(1, 1), (2, 2), (3, 3)]
