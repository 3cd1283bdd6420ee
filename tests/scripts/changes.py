"""Scripts that change something between epochs: optimizer, loader, data set, layers, defaults."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.utils.data import DataLoader, Dataset, Subset

import paceline

from .base import Record, Script, pushed, several
from .usual import CLASSES, WIDTH, network, one_epoch, points, tensors


def with_a_change(
    record: Record, change: Callable[[nn.Module, Any, Any], None], *, data: Any = None
) -> None:
    """Adam over three epochs, and ``change(model, optimizer, loader)`` before the second."""
    pace = paceline.connect()
    model = network()
    optimizer = Adam(model.parameters(), lr=0.02)
    loader = DataLoader(points() if data is None else data, batch_size=8)
    model, optimizer, loader = pace.prepare(model, optimizer, loader)
    for epoch in pace.epochs(3):
        if epoch == 1:
            change(model, optimizer, loader)
        one_epoch(pace, model, optimizer, loader)
        record.state(model)
    record.state(model, optimizer)


def another_optimizer(record: Record) -> None:
    """From Adam to SGD after the first epoch: a new optimizer that nobody prepared."""
    pace = paceline.connect()
    model = network()
    optimizer: Any = Adam(model.parameters(), lr=0.02)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for epoch in pace.epochs(3):
        if epoch == 1:
            optimizer = SGD(model.parameters(), lr=0.2)
        one_epoch(pace, model, optimizer, loader)
    record.state(model)


def optimizer_made_anew(record: Record) -> None:
    """optimizer.__init__ again, so that it forgets its moments and has another rate."""

    def change(model: nn.Module, optimizer: Any, loader: Any) -> None:
        optimizer.__init__(model.parameters(), lr=0.01)

    with_a_change(record, change)


def moments_forgotten(record: Record) -> None:
    """optimizer.state.clear(): warm restarts that forget the moments."""

    def change(model: nn.Module, optimizer: Any, loader: Any) -> None:
        optimizer.state.clear()

    with_a_change(record, change)


def moments_loaded(record: Record) -> None:
    """optimizer.load_state_dict() of what it was before the first epoch."""
    pace = paceline.connect()
    model = network()
    optimizer = Adam(model.parameters(), lr=0.02)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    before = optimizer.state_dict()
    for epoch in pace.epochs(3):
        if epoch == 1:
            optimizer.load_state_dict(before)
        one_epoch(pace, model, optimizer, loader)
    record.state(model, optimizer)


def betas_by_hand(record: Record) -> None:
    """Momentum and decay by hand: param_group["betas"], ["weight_decay"]."""

    def change(model: nn.Module, optimizer: Any, loader: Any) -> None:
        for group in optimizer.param_groups:
            group["betas"], group["weight_decay"] = (0.5, 0.9), 0.05

    with_a_change(record, change)


class Growing(Dataset[Any]):
    """Inputs times a factor that the script changes: progressive resizing, a curriculum."""

    def __init__(self) -> None:
        self.inputs, self.targets = tensors()
        self.factor = 1.0

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> Any:
        return self.inputs[index] * self.factor, self.targets[index]


def data_changed(record: Record) -> None:
    """An attribute of the data set is another from the second epoch on."""

    def change(model: nn.Module, optimizer: Any, loader: Any) -> None:
        loader.dataset.factor = 0.5

    with_a_change(record, change, data=Growing())


def other_samples(record: Record) -> None:
    """A subset's indices are others from the second epoch on, as many as before."""

    def change(model: nn.Module, optimizer: Any, loader: Any) -> None:
        loader.dataset.indices = list(range(32, 64))

    with_a_change(record, change, data=Subset(points(), list(range(32))))


def more_samples(record: Record) -> None:
    """A curriculum: a subset grows from 32 to 64 samples after the first epoch."""

    def change(model: nn.Module, optimizer: Any, loader: Any) -> None:
        loader.dataset.indices = list(range(64))

    with_a_change(record, change, data=Subset(points(), list(range(32))))


def another_loader(record: Record) -> None:
    """A new loader with larger batches after the first epoch, prepared as the first was."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.2)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for epoch in pace.epochs(3):
        if epoch == 1:
            loader = pace.prepare(DataLoader(points(), batch_size=16))
        one_epoch(pace, model, optimizer, loader)
    record.state(model, optimizer)


def layer_taken_out(record: Record) -> None:
    """A layer becomes nn.Identity() after the first epoch."""
    pace = paceline.connect()
    model = network(nn.Linear(12, 12).double())
    optimizer = SGD(model.parameters(), lr=0.2)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for epoch in pace.epochs(3):
        if epoch == 1:
            model[2] = nn.Identity()
        one_epoch(pace, model, optimizer, loader)
    record.state(model)


def layer_made_anew(record: Record) -> None:
    """The last layer is replaced by a new one after the first epoch: fine-tuning in one script."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.2)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for epoch in pace.epochs(3):
        if epoch == 1:
            torch.manual_seed(5)
            model[-1] = nn.Linear(12, CLASSES).double()
            optimizer.param_groups[0]["params"] = list(model.parameters())
        one_epoch(pace, model, optimizer, loader)
    record.state(model)


class Adapted(nn.Module):
    """A frozen layer and a low-rank change of it, as LoRA has it."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, 2, bias=False, dtype=torch.float64)
        self.up = nn.Linear(2, layer.out_features, bias=False, dtype=torch.float64)
        nn.init.zeros_(self.up.weight)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layer(inputs) + self.up(self.down(inputs))
        return outputs


def low_rank(record: Record) -> None:
    """LoRA: a frozen layer with a small change of it that trains; merged into it at the end."""
    pace = paceline.connect()
    model = network()
    model[0] = Adapted(model[0])  # type: ignore[arg-type]  # a Sequential's own, of two layers
    optimizer = Adam([one for one in model.parameters() if one.requires_grad], lr=0.02)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for _ in pace.epochs(3):
        one_epoch(pace, model, optimizer, loader)
    adapted = model[0]
    merged = adapted.layer.weight + adapted.up.weight @ adapted.down.weight
    record.epoch(merged=merged.detach())
    record.state(model, optimizer)


def spectral_norm(record: Record) -> None:
    """Spectral norm: its power iteration steps in each training pass, in buffers."""
    model = network()
    torch.manual_seed(4)
    nn.utils.parametrizations.spectral_norm(model[0])
    pace = paceline.connect()
    optimizer = SGD(model.parameters(), lr=0.2)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for _ in pace.epochs(3):
        one_epoch(pace, model, optimizer, loader)
    record.state(model, optimizer)


def default_dtype(record: Record) -> None:
    """torch.set_default_dtype(torch.float64) at the top, and layers made under it."""
    pace = paceline.connect()
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(3)
        model: nn.Module = nn.Sequential(nn.Linear(WIDTH, 12), nn.Tanh(), nn.Linear(12, CLASSES))
        optimizer = SGD(model.parameters(), lr=0.2, momentum=0.5)
        model, optimizer, loader = pace.prepare(
            model, optimizer, DataLoader(points(), batch_size=8)
        )
        for _ in pace.epochs(3):
            one_epoch(pace, model, optimizer, loader)
        record.state(model, optimizer)
    finally:
        torch.set_default_dtype(torch.float32)


SCRIPTS = (
    Script(another_optimizer, refused=several("was not prepared")),
    Script(optimizer_made_anew, refused=pushed("is not supported after prepare")),
    Script(moments_forgotten, refused=pushed("kept by the run for all workers")),
    Script(moments_loaded, refused=pushed("before the first epoch")),
    Script(betas_by_hand),
    Script(data_changed),
    Script(other_samples, num_samples=32),
    Script(more_samples, num_samples=32, refused=several("must have the same number")),
    Script(another_loader, refused=several("the second loader gives its batches inside")),
    Script(layer_taken_out, refused=several("added to the model or removed")),
    Script(layer_made_anew, refused=several("added to the model or removed")),
    Script(low_rank),
    Script(spectral_norm, is_exact=False),
    Script(default_dtype),
)
