"""Training as the chapter does it: from scratch, and over workers."""

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from paceline.d2l import training
from paceline.d2l.devices import split_batch, try_gpu
from paceline.d2l.training import (
    accuracy,
    evaluate_accuracy_gpu,
    load_data_fashion_mnist,
    sgd,
    train,
)
from paceline.errors import ConfigError


@pytest.fixture(autouse=True)
def digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The data set that ships with the package, which every machine has."""
    monkeypatch.setattr(training, "_DATA", "digits")


def test_loaders_hold_every_image_once() -> None:
    train_iter, test_iter = load_data_fashion_mnist(100)
    inputs, targets = next(iter(train_iter))
    assert (inputs.shape, inputs.dtype) == ((100, 1, 8, 8), torch.float32)
    assert (targets.shape, targets.dtype) == ((100,), torch.int64)
    assert 0.0 <= float(inputs.min()) < float(inputs.max()) <= 1.0
    assert sum(len(targets) for _, targets in train_iter) == 1_437
    assert sum(len(targets) for _, targets in test_iter) == 360


def test_training_images_are_shuffled_and_test_images_are_not() -> None:
    train_iter, test_iter = load_data_fashion_mnist(360)
    assert not torch.equal(next(iter(train_iter))[1], next(iter(train_iter))[1])
    assert torch.equal(next(iter(test_iter))[1], next(iter(test_iter))[1])


def test_images_are_scaled_by_the_batch() -> None:
    for loader in load_data_fashion_mnist(10, resize=20):
        assert next(iter(loader))[0].shape == (10, 1, 20, 20)


def test_batch_size_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="batch_size must be >= 1, got 0"):
        load_data_fashion_mnist(0)


def test_sgd_steps_by_the_mean_and_clears_the_gradient() -> None:
    param, unused = torch.ones(2, requires_grad=True), torch.ones(1, requires_grad=True)
    (param * torch.tensor([4.0, 8.0])).sum().backward()
    sgd([param, unused], lr=0.5, batch_size=4)
    assert param.tolist() == [0.5, 0.0]
    assert unused.tolist() == [1.0]
    assert param.grad is not None
    assert param.grad.tolist() == [0.0, 0.0]


def test_copies_that_were_not_detached_are_refused() -> None:
    copy_of_it = torch.ones(2, requires_grad=True).clone()
    copy_of_it.sum().backward()
    with pytest.raises(ConfigError, match=r"p.detach\(\).clone"):
        sgd([copy_of_it], 0.1, 1)


def all_reduce(values: list[Tensor]) -> None:
    total = torch.stack(values).sum(dim=0)
    for value in values:
        value.copy_(total)


def losses_of(num_devices: int, batches: list[tuple[Tensor, Tensor]]) -> Iterator[float]:
    """Data parallelism by hand: each device its copy of the parameters and its part of a batch."""
    devices = [try_gpu(i) for i in range(num_devices)]
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(64, 10, generator=generator, dtype=torch.float64) * 0.01, torch.zeros(10)]
    copies = [[p.clone().to(d).requires_grad_() for p in start] for d in devices]
    for inputs, targets in batches:
        parts = zip(*split_batch(inputs, targets, devices), copies, strict=True)
        losses = []
        for shard, labels, (weight, bias) in parts:
            outputs = shard.flatten(1).double() @ weight + bias
            losses.append(nn.functional.cross_entropy(outputs, labels, reduction="sum"))
        for loss in losses:
            loss.backward()
        with torch.no_grad():
            for gradients in zip(*([p.grad for p in params] for params in copies), strict=True):
                all_reduce(list(gradients))
        for params in copies:
            sgd(params, 0.5, len(targets))
        yield sum(loss.item() for loss in losses) / len(targets)


def test_two_devices_by_hand_compute_what_one_does() -> None:
    batches = list(load_data_fashion_mnist(99)[0])
    one, two = list(losses_of(1, batches)), list(losses_of(2, batches))
    assert two == pytest.approx(one, rel=1e-5)
    assert one[-1] < 0.8 * one[0]


def test_accuracy_counts_right_predictions() -> None:
    labels = torch.tensor([0, 1, 1])
    outputs = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7]])
    assert accuracy(outputs, labels) == accuracy(torch.tensor([0.0, 0.0, 1.0]), labels) == 2.0


def test_evaluation_gives_each_layer_its_mode_back() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Dropout(0.9), nn.BatchNorm1d(64), nn.Linear(64, 10))
    net[2].eval()  # frozen by the script
    test_iter = load_data_fashion_mnist(90)[1]
    before = copy.deepcopy(net.state_dict())
    share = evaluate_accuracy_gpu(net, test_iter)
    assert share == evaluate_accuracy_gpu(net, test_iter)  # no dropout
    assert 0.0 <= share <= 1.0
    assert [layer.training for layer in net] == [True, True, False, True]
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_function_is_evaluated_on_the_given_device() -> None:
    test_iter = load_data_fashion_mnist(90)[1]
    labels = torch.cat([targets for _, targets in test_iter])
    always_three = nn.functional.one_hot(torch.tensor(3), 10)
    share = evaluate_accuracy_gpu(
        lambda inputs: always_three.expand(len(inputs), 10), test_iter, try_gpu()
    )
    assert share == pytest.approx(float((labels == 3).float().mean()))


def test_evaluation_without_samples_is_refused() -> None:
    with pytest.raises(ConfigError, match="no samples"):
        evaluate_accuracy_gpu(nn.Linear(1, 1), [])


def test_two_workers_train_the_net_as_one_does(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.LazyLinear(10))
    other = copy.deepcopy(net)
    torch.manual_seed(1)
    one = train(net, 1, 60, 0.5, num_epochs=2, run_dir=str(tmp_path / "one"))
    torch.manual_seed(1)  # lazy layers draw their values in train
    two = train(other, 2, 60, 0.5, num_epochs=2, run_dir=str(tmp_path / "two"))
    assert one.test_accuracy is not None
    assert one.test_accuracy > 0.7
    assert two.test_accuracy == pytest.approx(one.test_accuracy, abs=0.01)
    for ours, theirs in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)
    share = evaluate_accuracy_gpu(net, load_data_fashion_mnist(90)[1])
    assert share == pytest.approx(one.test_accuracy)


def test_net_in_evaluation_mode_is_trained_as_any_other(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 10)).eval()
    train(net, 1, 360, 0.1, num_epochs=1, run_dir=str(tmp_path / "run"))
    assert int(net[1].num_batches_tracked) > 0
    assert not any(module.training for module in net.modules())


def test_dry_run_is_refused() -> None:
    with pytest.raises(ConfigError, match="dry_run trains nothing"):
        train(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), 1, 60, 0.5, dry_run=True)
