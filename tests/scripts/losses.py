"""Scripts that differ in their loss: means, sums, tokens, several terms, gradients of gradients."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, Dataset, TensorDataset

import paceline

from .base import Record, Script, gathered
from .usual import CLASSES, WIDTH, loss_of, network, points, tensors


def minimising(record: Record, loss: Any, learning_rate: float = 0.3, data: Any = None) -> None:
    """The loop of the README with this loss(model, inputs, targets)."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=learning_rate, momentum=0.5)
    loader = DataLoader(data or points(), batch_size=8)
    model, optimizer, loader = pace.prepare(model, optimizer, loader)
    for _ in pace.epochs(3):
        for inputs, targets in loader:
            with pace.step():
                optimizer.zero_grad()
                loss(model, inputs, targets).backward()
                optimizer.step()
    record.state(model, optimizer)


def mean_squares(record: Record) -> None:
    """MSE on one-hot targets."""

    def loss(model: Any, inputs: Tensor, targets: Tensor) -> Tensor:
        wanted = nn.functional.one_hot(targets, CLASSES).to(inputs)
        return nn.functional.mse_loss(model(inputs), wanted)

    minimising(record, loss)


def binary(record: Record) -> None:
    """BCE with logits, several labels a sample."""

    def loss(model: Any, inputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(
            model(inputs), (inputs[:, :CLASSES] > 0).to(inputs)
        )

    minimising(record, loss)


def smoothed(record: Record) -> None:
    """Cross entropy with label smoothing."""
    minimising(record, lambda model, x, y: loss_of(model(x), y, label_smoothing=0.1))


def several_terms(record: Record) -> None:
    """Cross entropy, an entropy bonus and an L1 penalty on the weights."""

    def loss(model: Any, inputs: Tensor, targets: Tensor) -> Tensor:
        outputs = model(inputs)
        chances = outputs.softmax(dim=1)
        entropy = -(chances * chances.log()).sum(dim=1).mean()
        penalty = sum(one.abs().sum() for one in model.parameters())
        return loss_of(outputs, targets) - 0.01 * entropy + 0.001 * penalty

    minimising(record, loss)


def two_backwards(record: Record) -> None:
    """Two losses of one batch, each with a backward of its own."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for _ in pace.epochs(3):
        for inputs, targets in loader:
            with pace.step():
                optimizer.zero_grad()
                outputs = model(inputs)
                (0.1 * outputs.pow(2).mean()).backward(retain_graph=True)
                loss_of(outputs, targets).backward()
                optimizer.step()
    record.state(model, optimizer)


def gradient_penalty(record: Record) -> None:
    """A penalty on the gradient by the inputs: create_graph=True."""

    def loss(model: Any, inputs: Tensor, targets: Tensor) -> Tensor:
        inputs = inputs.clone().requires_grad_()
        outputs = model(inputs)
        [gradient] = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
        return loss_of(outputs, targets) + 0.1 * gradient.pow(2).sum(dim=1).mean()

    minimising(record, loss)


def vector_backward(record: Record) -> None:
    """backward(gradient=...) of a loss that is one number a sample."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for _ in pace.epochs(3):
        for inputs, targets in loader:
            with pace.step():
                optimizer.zero_grad()
                each = loss_of(model(inputs), targets, reduction="none")
                each.backward(gradient=torch.full_like(each, 1 / len(each)))
                optimizer.step()
    record.state(model, optimizer)


def autograd_backward(record: Record) -> None:
    """torch.autograd.backward(loss)."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for _ in pace.epochs(3):
        for inputs, targets in loader:
            with pace.step():
                optimizer.zero_grad()
                torch.autograd.backward(loss_of(model(inputs), targets))
                optimizer.step()
    record.state(model, optimizer)


def autograd_grad(record: Record) -> None:
    """Gradients by torch.autograd.grad, put into .grad by hand."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for _ in pace.epochs(3):
        for inputs, targets in loader:
            with pace.step():
                loss = loss_of(model(inputs), targets)
                gradients = torch.autograd.grad(loss, list(model.parameters()))
                for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                    parameter.grad = gradient
                optimizer.step()
    record.state(model, optimizer)


def pace_backward(record: Record) -> None:
    """pace.backward(loss)."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for _ in pace.epochs(3):
        for inputs, targets in loader:
            with pace.step():
                optimizer.zero_grad()
                pace.backward(loss_of(model(inputs), targets))
                optimizer.step()
    record.state(model, optimizer)


def summed(record: Record) -> None:
    """A sum over samples and not their mean: several workers average their pushes."""
    minimising(record, lambda model, x, y: loss_of(model(x), y, reduction="sum"), 0.03)


def summed_by_parts(record: Record) -> None:
    """What several workers compute: the mean of the sums of their parts."""
    workers = paceline.connect().num_workers

    def loss(model: Any, inputs: Tensor, targets: Tensor) -> Tensor:
        return loss_of(model(inputs), targets, reduction="sum") / workers

    minimising(record, loss, 0.03)


class Sentences(Dataset[Any]):
    """Sequences of vectors with a class a token, and -100 where there is none."""

    def __init__(self) -> None:
        inputs, targets = tensors(64 * 5)
        self.inputs = inputs.view(64, 5, WIDTH)
        self.targets = targets.view(64, 5).clone()
        for number in range(64):
            self.targets[number, 1 + number * 7 % 5 :] = -100

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        return self.inputs[index], self.targets[index]


def token_loss(model: Any, inputs: Tensor, targets: Tensor) -> Tensor:
    return loss_of(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=-100)


def token_mean(record: Record) -> None:
    """A mean over tokens with ignore_index, each push weighted by its tokens: step.weight."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(Sentences(), batch_size=8))
    for _ in pace.epochs(3):
        for inputs, targets in loader:
            with pace.step() as step:
                step.weight = int((targets != -100).sum())
                optimizer.zero_grad()
                token_loss(model, inputs, targets).backward()
                optimizer.step()
    record.state(model, optimizer)


def token_mean_by_samples(record: Record) -> None:
    """The same without a weight: several workers weigh their means by samples."""
    minimising(record, token_loss, 0.3, Sentences())


def weighted_classes(record: Record) -> None:
    """Class weights, whose mean is over weights: each push weighted by them."""
    pace = paceline.connect()
    model = network()
    weights = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    optimizer = SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for _ in pace.epochs(3):
        for inputs, targets in loader:
            with pace.step() as step:
                step.weight = float(weights[targets].sum())
                optimizer.zero_grad()
                loss_of(model(inputs), targets, weight=weights).backward()
                optimizer.step()
    record.state(model, optimizer)


def contrastive(record: Record) -> None:
    """A loss over pairs of a batch's samples: a worker has the pairs of its part."""
    generator = torch.Generator().manual_seed(4)
    first = torch.randn(64, WIDTH, generator=generator, dtype=torch.float64)
    noise = torch.randn(64, WIDTH, generator=generator, dtype=torch.float64)

    def loss(model: Any, inputs: Tensor, others: Tensor) -> Tensor:
        alike = model(inputs) @ model(others).T
        return loss_of(alike, torch.arange(len(inputs)))

    minimising(record, loss, 0.1, TensorDataset(first, first + 0.1 * noise))


def loss_module(record: Record) -> None:
    """The loss is a module, criterion = nn.CrossEntropyLoss(), and is printed."""
    criterion = nn.CrossEntropyLoss()
    minimising(record, lambda model, inputs, targets: criterion(model(inputs), targets))


def losses_logged(record: Record) -> None:
    """Running means of the loss, by loss.item(), and pace.log and pace.print."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for epoch in pace.epochs(3):
        running = 0.0
        for inputs, targets in loader:
            with pace.step():
                optimizer.zero_grad()
                loss = loss_of(model(inputs), targets)
                loss.backward()
                optimizer.step()
                running += loss.item()
                record.part(loss=loss.item())
        pace.log({"loss": running / len(loader)})
        pace.print(f"epoch {epoch}: {running / len(loader):.4f}")
    record.state(model, optimizer)


SCRIPTS = (
    Script(mean_squares),
    Script(binary),
    Script(smoothed),
    Script(several_terms),
    Script(two_backwards),
    Script(gradient_penalty),
    Script(vector_backward),
    Script(autograd_backward),
    Script(autograd_grad, refused=gathered("the gradient of .* was changed")),
    Script(pace_backward),
    Script(summed, like_several=summed_by_parts),
    Script(token_mean),
    Script(token_mean_by_samples, is_exact=False),
    Script(weighted_classes),
    Script(contrastive, is_exact=False),
    Script(loss_module),
    Script(losses_logged),
)
