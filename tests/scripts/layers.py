"""Scripts about which parameters train: frozen, unfrozen, tied, unused, in groups; and buffers."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.optim import SGD, Adam
from torch.utils.data import DataLoader, Dataset

import paceline

from .base import Record, Script, loose, several
from .usual import CLASSES, WIDTH, count_right, held_out, loss_of, network, one_epoch, points


class Columns(Dataset[Any]):
    """A text in columns, as word_language_model has it: sample c B + j is chunk c of column j."""

    def __init__(self, num_columns: int = 8, num_chunks: int = 8, length: int = 5) -> None:
        text = torch.arange(num_columns * (num_chunks * length + 1)).pow(2) % 7
        self.columns = text.view(num_columns, -1)
        self.length, self.num_chunks = length, num_chunks

    def __len__(self) -> int:
        return len(self.columns) * self.num_chunks

    def __getitem__(self, index: int) -> Any:
        chunk, column = divmod(index, len(self.columns))
        row = self.columns[column, chunk * self.length :][: self.length + 1]
        return row[:-1], row[1:]


class Words(nn.Module):
    """The next word, by an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.words, self.out = nn.Embedding(7, 6), nn.Linear(10, 7)
        self.cell = nn.LSTM(6, 10, batch_first=True)

    def forward(self, words: Tensor, state: Any) -> tuple[Tensor, Any]:
        """(columns, words) -> (columns, words, vocabulary), and the state."""
        found, state = self.cell(self.words(words), state)
        return self.out(found), state


def state_carried(record: Record) -> None:
    """An LSTM's state is carried from batch to batch, as in word_language_model: sticky=True."""
    pace = paceline.connect()
    model = Words().double()
    optimizer = Adam(model.parameters(), lr=0.02)
    loader = DataLoader(Columns(), batch_size=8)
    model, optimizer, loader = pace.prepare(model, optimizer, loader, sticky=True)
    for _ in pace.epochs(3):
        state: Any = None
        for words, following in loader:
            with pace.step():
                optimizer.zero_grad()
                state = None if state is None else tuple(one.detach() for one in state)
                scores, state = model(words, state)
                loss = loss_of(scores.flatten(0, 1), following.flatten())
                loss.backward()
                optimizer.step()
            record.part(loss=loss)
    record.state(model, optimizer)


def trained(record: Record, model: nn.Module, optimizer: Any) -> None:
    """The loop of the README, the state after each epoch."""
    pace = paceline.connect()
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for _ in pace.epochs(3):
        one_epoch(pace, model, optimizer, loader)
        record.state(model)
    record.state(model, optimizer)


def frozen(record: Record) -> None:
    """The first layer is frozen; the optimizer has the others alone."""
    model = network()
    model[0].requires_grad_(False)
    trained(record, model, Adam([one for one in model.parameters() if one.requires_grad], lr=0.02))


def frozen_in_the_optimizer(record: Record) -> None:
    """The first layer is frozen and given to the optimizer all the same."""
    model = network()
    model[0].requires_grad_(False)
    trained(record, model, SGD(model.parameters(), lr=0.2, momentum=0.5, weight_decay=0.01))


def not_in_the_optimizer(record: Record) -> None:
    """A layer has gradients and no optimizer."""
    model = network()
    trained(record, model, SGD(model[-1].parameters(), lr=0.3))


def groups(record: Record) -> None:
    """Two parameter groups, each with a rate and a decay of its own."""
    model = network()
    several_groups: Any = [
        {"params": model[0].parameters(), "lr": 0.1, "weight_decay": 0.05},
        {"params": model[-1].parameters()},
    ]
    trained(record, model, SGD(several_groups, lr=0.2, momentum=0.5))


def unfrozen_later(record: Record) -> None:
    """The first layer is unfrozen after the first epoch; the optimizer had it all along."""
    pace = paceline.connect()
    model = network()
    model[0].requires_grad_(False)
    optimizer = SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for epoch in pace.epochs(3):
        if epoch == 1:
            model[0].requires_grad_(True)
        one_epoch(pace, model, optimizer, loader)
    record.state(model, optimizer)


def frozen_later(record: Record) -> None:
    """The first layer is frozen after the first epoch."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for epoch in pace.epochs(3):
        if epoch == 1:
            model[0].requires_grad_(False)
        one_epoch(pace, model, optimizer, loader)
    record.state(model, optimizer)


def group_added(record: Record) -> None:
    """add_param_group after the first epoch (gradual unfreezing)."""
    pace = paceline.connect()
    model = network()
    optimizer = SGD(model[-1].parameters(), lr=0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for epoch in pace.epochs(3):
        if epoch == 1:
            optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.1})
        one_epoch(pace, model, optimizer, loader)
    record.state(model, optimizer)


class Tied(nn.Module):
    """Two layers that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight
        self.out = nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.out(torch.tanh(self.second(torch.tanh(self.first(inputs)))))
        return outputs


def tied_weights(record: Record) -> None:
    """Two layers share a weight."""
    torch.manual_seed(3)
    model = Tied().double()
    trained(record, model, SGD(model.parameters(), lr=0.2, momentum=0.5))


class Heads(nn.Module):
    """A trunk with two heads, of which a call uses one, and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(WIDTH, 8)
        self.heads = nn.ModuleList(nn.Linear(8, CLASSES) for _ in range(3))

    def forward(self, inputs: Tensor, head: int) -> Tensor:
        outputs: Tensor = self.heads[head](torch.tanh(self.trunk(inputs)))
        return outputs


def head_by_turns(record: Record) -> None:
    """Two heads take turns batch by batch, a third is never used: gradients that are None."""
    pace = paceline.connect()
    torch.manual_seed(3)
    model = Heads().double()
    optimizer = SGD(model.parameters(), lr=0.2, momentum=0.5)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for _ in pace.epochs(3):
        for number, (inputs, targets) in enumerate(loader):
            with pace.step():
                optimizer.zero_grad()
                loss_of(model(inputs, number % 2), targets).backward()
                optimizer.step()
    record.state(model, optimizer)


def head_by_epochs(record: Record) -> None:
    """Another head each epoch."""
    pace = paceline.connect()
    torch.manual_seed(3)
    model = Heads().double()
    optimizer = Adam(model.parameters(), lr=0.02)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for epoch in pace.epochs(3):
        for inputs, targets in loader:
            with pace.step():
                optimizer.zero_grad()
                loss_of(model(inputs, epoch), targets).backward()
                optimizer.step()
    record.state(model, optimizer)


def layer_norm(record: Record) -> None:
    """LayerNorm, which looks at one sample at a time."""
    model = network(nn.LayerNorm(12))
    trained(record, model, SGD(model.parameters(), lr=0.2))


def batch_norm(record: Record) -> None:
    """BatchNorm1d: its statistics are those of a worker's part."""
    model = network(nn.BatchNorm1d(12))
    trained(record, model, SGD(model.parameters(), lr=0.1))


def batch_norm_cumulative(record: Record) -> None:
    """BatchNorm1d with momentum=None: a cumulative average."""
    model = network(nn.BatchNorm1d(12, momentum=None))
    trained(record, model, SGD(model.parameters(), lr=0.1))


def batch_norm_frozen(record: Record) -> None:
    """BatchNorm1d that stays in evaluation mode, also after pace.evaluate."""
    pace = paceline.connect()
    model = network(nn.BatchNorm1d(12))
    model[2].running_mean += 0.1
    model[2].eval()
    optimizer = SGD(model.parameters(), lr=0.2)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for _ in pace.epochs(3):
        one_epoch(pace, model, optimizer, loader)
        pace.evaluate(count_right(model), DataLoader(held_out(), 5))
        record.fact(trains=[one.training for one in model.modules()])
    record.state(model, optimizer)


class Counting(nn.Module):
    """Counts its training passes in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.passes += 1  # type: ignore[operator, assignment]
        outputs: Tensor = self.layer(inputs)
        return outputs


def counting_buffer(record: Record) -> None:
    """A buffer counts training passes."""
    torch.manual_seed(3)
    model = Counting().double()
    trained(record, model, SGD(model.parameters(), lr=0.2))


def weight_norm(record: Record) -> None:
    """A parametrisation: weight norm on the first layer."""
    model = network()
    nn.utils.parametrizations.weight_norm(model[0])
    trained(record, model, SGD(model.parameters(), lr=0.2))


def pruned(record: Record) -> None:
    """A pruned layer: a mask in a buffer, the weight made anew in each pass."""
    model = network()
    prune.l1_unstructured(model[0], "weight", amount=0.5)
    trained(record, model, SGD(model.parameters(), lr=0.2))


def single_number(record: Record) -> None:
    """A parameter that is one number: a learned temperature."""
    pace = paceline.connect()
    model = network()
    model.register_parameter("heat", nn.Parameter(torch.tensor(1.0, dtype=torch.float64)))
    optimizer = SGD(model.parameters(), lr=0.2)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(points(), batch_size=8))
    for _ in pace.epochs(3):
        for inputs, targets in loader:
            with pace.step():
                optimizer.zero_grad()
                loss_of(model(inputs) * model.heat, targets).backward()
                optimizer.step()
    record.state(model, optimizer)


class Codebook(nn.Module):
    """Two layers, and a mean of what comes between them that forward() makes anew."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = network()[0], network()[-1]
        self.mean = nn.Parameter(torch.zeros(12, dtype=torch.float64), requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs).tanh()
        if self.training:
            now = hidden.detach().mean(dim=0)
            self.mean = nn.Parameter(0.9 * self.mean + 0.1 * now, requires_grad=False)
        made: Tensor = self.last(hidden - self.mean)
        return made


def parameter_made_anew(record: Record) -> None:
    """A parameter that forward() makes anew (the codebook of a VQ-VAE with averages)."""
    model = Codebook()
    trained(record, model, SGD(model.parameters(), lr=0.2))


UNFROZEN = "requires_grad|frozen|unfr"

SCRIPTS = (
    Script(state_carried, refused=loose("sticky=True", is_early=True)),
    Script(frozen),
    Script(frozen_in_the_optimizer),
    Script(not_in_the_optimizer),
    Script(groups),
    Script(unfrozen_later, refused=several(UNFROZEN, is_sure=False)),
    Script(frozen_later, refused=several(UNFROZEN, is_sure=False)),
    Script(group_added, refused=several("add_param_group", is_sure=False)),
    Script(tied_weights),
    Script(head_by_turns),
    Script(head_by_epochs, falls=False),
    Script(layer_norm),
    Script(batch_norm, is_exact=False),
    Script(batch_norm_cumulative, is_exact=False),
    Script(batch_norm_frozen),
    Script(counting_buffer),
    Script(weight_norm),
    Script(pruned),
    Script(single_number),
    Script(parameter_made_anew, refused=several("'mean' was replaced after prepare")),
)
