"""A model whose loss is known trains by 1f1b and interleaved as one device does.

Workers are threads over real gloo (tests/support/threaded.py); a run of ranks is in test_runs.py.
"""

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import ConfigError
from paceline.partition.names import SplitName
from paceline.partition.pipeline import EndSizes, micro_batch_shares
from paceline.spread.cut import make_cut
from paceline.spread.group import Ranks, SplitGroups
from paceline.spread.pipeline import PartRunner
from paceline.spread.scheduled import ScheduledRunner
from paceline.spread.trained import BatchLoss, TrainedModel, batch_loss
from threaded import close_to, in_threads


class Skipping(nn.Module):
    """A skip connection, a tied weight and an in-place activation, in six layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))
        self.layers[3].weight = self.layers[1].weight
        self.act, self.out = nn.ReLU(inplace=True), nn.Linear(6, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        first = self.act(self.layers[0](x))
        hidden = first
        for layer in self.layers[1:]:
            hidden = torch.tanh(layer(hidden))
        out: Tensor = self.out(hidden + first)
        return out


with torch.random.fork_rng():
    torch.manual_seed(2)
    SKIPPING = Skipping()
    X = torch.randn(20, 6, dtype=torch.float64)
Y, WEIGHTS = X[:, :3].argmax(1), torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
LOSS = nn.functional.cross_entropy


def batch(size: int) -> tuple[Tensor, Tensor]:
    return X[:size], Y[:size]


def by_class(size: int) -> tuple[Tensor, Tensor]:
    """Sorted data: the first samples are of one class."""
    order = Y.argsort()[:size]
    return X[order], Y[order]


def of_one_class(size: int) -> tuple[Tensor, Tensor]:
    return X[:size], torch.zeros(size, dtype=torch.int64)


def trained(ranks: Ranks, model: nn.Module, schedule: str) -> TrainedModel:
    name = SplitName(ranks.everyone.size, 1, schedule=schedule)
    cut = make_cut(model, lambda size: (X[:size],), 4, ranks, name, lambda *_: 1.0)
    groups = SplitGroups(ranks, name, cut.order)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    known = batch_loss(model, LOSS, batch)
    return TrainedModel(model, [optimizer], cut, groups, lambda: 4, known)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
@pytest.mark.parametrize("rows", [(4, 4), (4, 3), (3, 4, 2)])
@pytest.mark.parametrize("ends", [None, EndSizes(0.33, 1.0), EndSizes(0.5, 0.5)], ids=str)
def test_losses_and_gradients_equal_those_of_the_whole(
    schedule: str, rows: tuple[int, ...], ends: EndSizes | None
) -> None:
    """Where there are ends, a worker has one micro-batch, but for who has a smaller end."""
    whole, size = copy.deepcopy(SKIPPING), len(rows)
    shares = list(zip(X[: sum(rows)].split(rows), Y[: sum(rows)].split(rows), strict=True))
    losses = [LOSS(whole(x), y) for x, y in shares]
    (torch.stack(losses).sum() / size).backward()  # each worker has 4 samples by its lease

    def work(ranks: Ranks) -> tuple[float, dict[str, Tensor | None]]:
        model = copy.deepcopy(SKIPPING)
        made = trained(ranks, model, schedule)
        if ends is not None:
            object.__setattr__(made.cut, "shares", micro_batch_shares(size, 1, ends))
        loss = made.train_on(*shares[ranks.everyone.rank])
        loss.backward()  # type: ignore[no-untyped-call]
        made.come_to_end()
        return float(loss.detach()), {name: one.grad for name, one in made.own.named_parameters()}

    actual = in_threads(size, work)
    for (loss, _), expected in zip(actual, losses, strict=True):
        assert loss == pytest.approx(float(expected.detach()), rel=1e-12)
    for name, parameter in whole.named_parameters():
        held = [grads[name] for _, grads in actual if name in grads]
        assert held, f"nobody holds {name}"
        total = torch.stack([one for one in held if one is not None]).sum(0)  # of a tied one
        assert parameter.grad is not None
        assert close_to(total, parameter.grad), name


def test_interleaved_schedule_gives_workers_separate_parts() -> None:
    def work(ranks: Ranks) -> tuple[set[str], str]:
        made = trained(ranks, copy.deepcopy(SKIPPING), "interleaved")
        return {name for name, _ in made.own.named_parameters()}, made.note

    (first, note), (last, _) = in_threads(2, work)
    biases = [*(f"layers.{i}.bias" for i in range(5)), "out.bias"]
    owners = [int(name in last) for name in biases]
    assert [name in first for name in biases] == [not one for one in owners]
    assert [one for one, _ in itertools.groupby(owners)] == [0, 1, 0, 1]
    assert "micro-batches by interleaved" in note


def test_worker_without_a_mini_batch_computes_its_part() -> None:
    whole = copy.deepcopy(SKIPPING)
    LOSS(whole(X[:4]), Y[:4]).backward()

    def work(ranks: Ranks) -> dict[str, Tensor | None]:
        made = trained(ranks, copy.deepcopy(SKIPPING), "1f1b")
        if ranks.everyone.rank:
            made.train_on(X[:4], Y[:4]).backward()  # type: ignore[no-untyped-call]
        made.come_to_end()
        return {name: one.grad for name, one in made.own.named_parameters()}

    grads = in_threads(2, work)
    for name, parameter in whole.named_parameters():
        held = [grad[name] for grad in grads if grad.get(name) is not None]
        total = torch.stack([one for one in held if one is not None]).sum(0)
        assert parameter.grad is not None
        assert close_to(total, parameter.grad), name


def test_schedule_1f1b_keeps_fewer_micro_batches_than_gpipe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alive, most = [0, 0], [0, 0]
    own_compute, own_back = PartRunner._compute, PartRunner._compute_back

    def compute(self: PartRunner, part: int, entering: list[Tensor], owner: int) -> object:
        alive[self.here] += 1
        most[self.here] = max(most[self.here], alive[self.here])
        return own_compute(self, part, entering, owner)

    def back(self: PartRunner, made: list[Tensor], gradients: list[Tensor]) -> None:
        alive[self.here] -= 1
        own_back(self, made, gradients)

    monkeypatch.setattr(ScheduledRunner, "_compute", compute)
    monkeypatch.setattr(ScheduledRunner, "_compute_back", back)

    def work(ranks: Ranks) -> int:
        made = trained(ranks, copy.deepcopy(SKIPPING), "1f1b")
        object.__setattr__(made.cut, "shares", ((0.25,) * 4,) * 2)
        made.train_on(X[:4], Y[:4])
        return len(made.cut.shares[0])

    assert in_threads(2, work) == [4, 4]
    assert alive == [0, 0]
    assert most == [2, 1]


def test_scaled_loss_is_refused() -> None:
    def work(ranks: Ranks) -> str:
        made = trained(ranks, copy.deepcopy(SKIPPING), "1f1b")
        with pytest.raises(ConfigError) as refused:
            (made.train_on(X[:4], Y[:4]) / 2).backward()  # type: ignore[no-untyped-call]
        return str(refused.value)

    assert all("use --split network:gpipe" in result for result in in_threads(2, work))


@pytest.mark.parametrize(
    ("loss", "given", "words"),
    [
        (lambda out, y: LOSS(out, y, reduction="sum"), batch, "is not the mean over its rows"),
        (lambda out, y: LOSS(out, y, ignore_index=int(Y[0])), batch, "is not the mean over its"),
        (lambda out, y: LOSS(out, y, WEIGHTS), by_class, "is not the mean over its rows"),
        (lambda out, y: LOSS(out, y, WEIGHTS), of_one_class, "is not the mean over its rows"),
        (LOSS, lambda size: (X[:size], [1] * size), "not a pair of tensors"),
        (LOSS, lambda size: {"x": X[:size]}, "not a pair of tensors"),
        (lambda out, y: LOSS(out[1:], y[1:]) if len(y) > 1 else out[3], batch, "take single rows"),
        (lambda out, y: out.mean(1), batch, "is not the mean over its rows"),
    ],
)
def test_loss_changed_by_micro_batches_is_refused_with_the_reason(
    loss: Callable[[Tensor, Tensor], Tensor], given: Callable[[int], object], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        batch_loss(copy.deepcopy(SKIPPING), loss, given)


def test_a_model_that_begins_with_equal_outputs_hides_no_other_mean() -> None:
    model = copy.deepcopy(SKIPPING)
    nn.init.zeros_(model.out.weight)
    nn.init.zeros_(model.out.bias)
    assert batch_loss(model, LOSS, batch).outputs == 1
    with pytest.raises(ConfigError, match="is not the mean over its rows"):
        batch_loss(model, lambda out, y: LOSS(out, y, WEIGHTS), batch)


def test_mean_over_rows_is_supported() -> None:
    result = batch_loss(copy.deepcopy(SKIPPING), LOSS, batch)
    assert isinstance(result, BatchLoss)
    assert result.target.empty(7).shape == (7,)
    assert result.target.dtype is torch.int64


def test_head_unused_by_the_loss_gets_no_gradient() -> None:
    class Heads(Skipping):
        def __init__(self) -> None:
            super().__init__()
            self.side, self.box = nn.Linear(6, 6).double(), nn.Linear(6, 2).double()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            return super().forward(x), self.box(torch.tanh(self.side(x)))

    def loss_of(made: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
        return LOSS(made[0], targets)

    with torch.random.fork_rng():
        whole = Heads()

    def work(ranks: Ranks) -> dict[str, Tensor | None]:
        model, name = copy.deepcopy(whole), SplitName(2, 1, schedule="1f1b")
        cut = make_cut(model, lambda size: (X[:size],), 4, ranks, name, lambda *_: 1.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        known = batch_loss(model, loss_of, batch)
        groups = SplitGroups(ranks, name, cut.order)
        made = TrainedModel(model, [optimizer], cut, groups, lambda: 4, known)
        made.train_on(X[:4], Y[:4]).backward()  # type: ignore[no-untyped-call]
        made.come_to_end()
        return {name: one.grad for name, one in made.own.named_parameters()}

    grads = in_threads(2, work)
    held = {name: one for found in grads for name, one in found.items()}
    assert {name for name, one in held.items() if one is None} == {
        "side.weight", "side.bias", "box.weight", "box.bias"
    }  # fmt: skip
