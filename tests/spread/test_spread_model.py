"""A model over several workers computes the same as alone: outputs, gradients, names.

Workers are threads over real gloo (tests/support/threaded.py); a run of ranks is in test_runs.py.
"""

import copy
import math
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import ConfigError, WorkerError
from paceline.exchange.base import End
from paceline.partition.names import SplitName
from paceline.replica.replica import Replica
from paceline.spread.averaging import SplitAveraging
from paceline.spread.base import SpreadModel
from paceline.spread.borders import inputs_of
from paceline.spread.chunks import TensorShape, chunk_rows, chunks_of
from paceline.spread.cut import make_cut
from paceline.spread.group import Ranks, SplitGroups
from paceline.spread.meeting import PartTask
from paceline.spread.model import PipelinedModel, refuse_uneven_hooks
from paceline.spread.modes import in_mode, module_mode
from paceline.spread.pipeline import refuse_other_sizes
from paceline.spread.shards import ShardedModel
from paceline.spread.units import find_units, refuse_hidden
from paceline.spread.whole import PartVersion
from threaded import close_to, in_threads


class Branching(nn.Module):
    """A skip connection, a tied weight, an in-place activation, two inputs, two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(6, 6) for _ in range(3))
        self.third.weight = self.second.weight
        self.act, self.out = nn.ReLU(inplace=True), nn.Linear(6, 3)
        self.double()

    def forward(self, x: Tensor, mask: Tensor) -> dict[str, Tensor]:
        first = self.act(self.first(x))
        hidden = torch.tanh(self.second(first)) * mask
        hidden = torch.tanh(self.third(hidden)) + first
        return {"out": self.out(hidden), "hidden": hidden}


with torch.random.fork_rng():
    torch.manual_seed(2)
    BRANCHING = Branching()
"""Made once, because threads share one generator."""


def in_own_random(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return make()


def model_and_inputs(rows: int = 12) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 6, generator=generator, dtype=torch.float64)
    return copy.deepcopy(BRANCHING), (x, (x > 0).double())


def spread(ranks: Ranks, model: nn.Module, inputs: Any, name: SplitName) -> SpreadModel:
    cut = make_cut(
        model, lambda size: tuple(one[:size] for one in inputs), 4, ranks, name, lambda *_: 1.0
    )
    groups = SplitGroups(ranks, name, cut.order)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    made = PipelinedModel(model, [optimizer], cut, groups, lambda: 4)
    made.optimizer = optimizer  # type: ignore[attr-defined]
    return made


def loss_of(outputs: dict[str, Tensor]) -> Tensor:
    return (outputs["out"] ** 2).mean() + outputs["hidden"].sin().mean()


@pytest.mark.parametrize(("parts", "rows"), [(2, (4, 4)), (2, (5, 2)), (3, (4, 1, 3))])
def test_outputs_and_gradients_equal_those_of_the_whole(parts: int, rows: tuple[int, ...]) -> None:
    whole, inputs = model_and_inputs()
    shares = [one.split(rows) for one in (x[: sum(rows)] for x in inputs)]
    losses = [loss_of(whole(*(share[i] for share in shares))) for i in range(parts)]
    # every worker has 4 samples by its lease, so all losses have equal weight
    (torch.stack(losses).sum() / parts).backward()

    def work(ranks: Ranks) -> tuple[dict[str, Tensor], dict[str, Tensor | None], set[str]]:
        model, _ = model_and_inputs()
        made = spread(ranks, model, inputs, SplitName(parts, 1))
        outputs = model(*(share[ranks.everyone.rank] for share in shares))
        loss_of(outputs).backward()
        made.come_to_end()
        grads = {name: one.grad for name, one in made.own.named_parameters()}
        return {k: v.detach() for k, v in outputs.items()}, grads, set(made.shared)

    actual = in_threads(parts, work)
    for number, (outputs, _, _) in enumerate(actual):
        expected = whole(*(share[number] for share in shares))
        assert outputs.keys() == expected.keys()
        assert all(close_to(outputs[name], expected[name]) for name in expected)
    for name, parameter in whole.named_parameters():
        held = [grads[name] for _, grads, _ in actual if name in grads]
        assert held, f"nobody holds {name}"
        total = torch.stack([one for one in held if one is not None]).sum(0)  # of a tied one
        assert parameter.grad is not None
        assert close_to(total, parameter.grad), name


class Spectral(nn.Module):
    """A complex spectrum bypasses the cut layers and is returned."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.body = nn.Linear(6, 6), nn.Sequential(nn.Linear(4, 300), nn.Tanh())
        self.last = nn.Linear(300, 4)
        self.double()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        z = torch.fft.rfft(self.first(x))
        z = z * self.last(self.body(z.abs()))
        return {"out": torch.fft.irfft(z), "hidden": torch.view_as_real(z), "z": z}


def test_complex_tensor_crossing_a_border_has_a_gradient() -> None:
    whole, (_, (x, _)) = Spectral(), model_and_inputs()
    loss_of(outputs := whole(x[:8])).add(outputs["z"].abs().mean()).backward()

    def work(ranks: Ranks) -> tuple[dict[str, Tensor | None], bool]:
        model = copy.deepcopy(whole)
        model.zero_grad()
        made = spread(ranks, model, (x,), SplitName(2, 1))
        outputs = model(x[:8].chunk(2)[ranks.everyone.rank])
        loss_of(outputs).add(outputs["z"].abs().mean()).backward()
        made.come_to_end()
        crossing = [one.dtype.is_complex for one in made.cut.borders[1]]  # type: ignore[attr-defined]
        return {name: one.grad for name, one in made.own.named_parameters()}, any(crossing)

    results = in_threads(2, work)
    assert results[0][1]
    for name, parameter in whole.named_parameters():
        held = [grads[name] for grads, _ in results if name in grads]
        assert held[0] is not None
        assert parameter.grad is not None
        assert close_to(held[0], parameter.grad), name


class Attending(nn.Module):
    """Blocks, batch norm, a tied last layer used outside its module, an unused layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 6, bias=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 9), nn.ReLU(inplace=True), nn.Linear(9, 6)) for _ in range(2)
        )
        self.frozen, self.unused = nn.Linear(6, 6), nn.Linear(2, 2)
        self.frozen.weight.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(6))
        self.double()

    def forward(self, x: Tensor, mask: Tensor) -> dict[str, Tensor]:
        hidden = self.embed(x) * self.scale
        for block in self.blocks:
            hidden = hidden + block(hidden)
        hidden = torch.tanh(self.frozen(hidden)) * mask
        return {"out": hidden @ self.embed.weight, "hidden": hidden}


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("rows", [(4, 4), (5, 2, 3)])
def test_shards_hold_pieces_of_the_whole_gradient(stage: int, rows: tuple[int, ...]) -> None:
    whole = in_own_random(Attending)
    state, size = {k: v.clone() for k, v in whole.state_dict().items()}, len(rows)
    _, inputs = model_and_inputs()
    shares = [one.split(rows) for one in (x[: sum(rows)] for x in inputs)]
    losses = [loss_of(whole(*(share[i] for share in shares))) for i in range(size)]
    (torch.stack(losses).sum() / size).backward()

    def work(ranks: Ranks) -> tuple[dict[str, Tensor], dict[str, tuple[int, Any]]]:
        model, rank = Attending(), ranks.everyone.rank
        model.load_state_dict(state)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        groups = SplitGroups(ranks, SplitName(size, 1, stage))
        made = ShardedModel(
            model, [optimizer], groups, stage, lambda: model(*(x[:4] for x in inputs)), lambda: 4
        )
        outputs = model(*(share[rank] for share in shares))
        loss_of(outputs).backward()
        made.come_to_end()
        with torch.no_grad():
            seen = model(*(share[rank] for share in shares))  # while others evaluate, too
            if rank == 0:
                model(*inputs)
        made.come_to_end()
        assert all(close_to(seen[name], outputs[name]) for name in seen)
        with pytest.raises(ConfigError, match="is in pieces on all workers"):
            model.scale.sum()
        grads = {
            name: (made.starts[name], None if one.grad is None else one.grad.clone())
            for name, one in made.own.named_parameters()
        }
        if rank == 0:  # the others have no mini-batch: they send pieces and receive sums
            loss_of(model(*inputs)).backward()
        made.come_to_end()
        return {k: v.detach() for k, v in outputs.items()}, grads

    actual = in_threads(size, work)
    for number, (outputs, _) in enumerate(actual):
        expected = whole(*(share[number] for share in shares))
        assert all(close_to(outputs[name], expected[name]) for name in expected)
    for name, parameter in whole.named_parameters():
        held = sorted((grads[name] for _, grads in actual if name in grads), key=lambda one: one[0])
        assert held, f"nobody holds {name}"
        if parameter.grad is None:
            assert all(one is None for _, one in held), name
        else:
            assert close_to(torch.cat([one for _, one in held]), parameter.grad.reshape(-1)), name


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_backward_supports_two_calls_of_shards(stage: int) -> None:
    whole, (_, inputs) = in_own_random(Attending), model_and_inputs()
    shares = [one[:8].split((5, 3)) for one in inputs]
    losses = [twice(whole, *(share[i] for share in shares)) for i in range(2)]
    (torch.stack(losses).sum() / 2).backward()

    def work(ranks: Ranks) -> dict[str, tuple[int, Any]]:
        model = copy.deepcopy(whole)
        model.zero_grad()
        groups = SplitGroups(ranks, SplitName(2, 1, stage))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        made = ShardedModel(
            model, [optimizer], groups, stage, lambda: model(*(x[:4] for x in inputs)), lambda: 4
        )
        for _ in range(2):
            made.own.zero_grad()
            twice(model, *(share[ranks.everyone.rank] for share in shares)).backward()
            made.come_to_end()
        return {name: (made.starts[name], one.grad) for name, one in made.own.named_parameters()}

    results = in_threads(2, work)
    for name, parameter in whole.named_parameters():
        if parameter.grad is not None:
            held = sorted(
                (result[name] for result in results if name in result), key=lambda one: one[0]
            )
            assert close_to(torch.cat([one for _, one in held]), parameter.grad.reshape(-1)), name


def test_hidden_tensors_in_an_output_are_refused() -> None:
    mean = torch.zeros(2, requires_grad=True)
    hidden = torch.distributions.Independent(torch.distributions.Normal(mean * 2, 1.0), 1)
    refuse_hidden("Net", {"out": mean, "kind": "x", "device": mean.device, "net": nn.Linear(1, 1)})
    refuse_hidden("Net", torch.distributions.Normal(torch.zeros(2), 1.0))
    with pytest.raises(
        ConfigError, match="Net returns an object, Independent, and gradients of tensors"
    ):
        refuse_hidden("Net", [mean, (hidden,)])


def twice(model: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
    return loss_of(model(x, mask)) + 0.5 * loss_of(model(x.sin(), mask))


def test_units_are_blocks_and_shared_parameters_stay_with_the_model() -> None:
    model = Attending()

    def work(ranks: Ranks) -> list[tuple[bool, int, int]]:
        units = find_units(model, {id(model.embed.weight)}, ranks.everyone)
        return [
            (unit.module is None, unit.num_bytes, sum(p.held.numel() for p in unit.pieces))
            for unit in units
        ]

    # the model's own: the tied embedding and the scale; then one unit per layer
    result = in_threads(1, work)[0]
    sizes = [42, 63, 60, 63, 60, 42, 6]
    assert result == [(not number, 8 * size, size) for number, size in enumerate(sizes)]


def test_others_serve_a_worker_with_more_calls() -> None:
    whole, inputs = model_and_inputs()

    def work(ranks: Ranks) -> list[Tensor]:
        model, _ = model_and_inputs()
        made = spread(ranks, model, inputs, SplitName(2, 1))
        seen = []
        with torch.no_grad():
            for _ in range(3 if ranks.everyone.rank else 1):
                seen.append(model(*inputs)["out"])
        made.come_to_end()
        if ranks.everyone.rank == 0:
            loss_of(model(*inputs)).backward()
        made.come_to_end()
        return seen

    for seen in in_threads(2, work):
        assert all(close_to(one, whole(*inputs)["out"]) for one in seen)


def test_diverging_worker_is_named_in_all_workers() -> None:
    _, inputs = model_and_inputs()

    def work(ranks: Ranks) -> str:
        model, _ = model_and_inputs()
        spread(ranks, model, inputs, SplitName(2, 1))
        outputs = model(*inputs)
        with pytest.raises(ConfigError) as refused:
            loss_of(outputs).backward() if ranks.everyone.rank else model(*inputs)
        return str(refused.value)

    messages = in_threads(2, work)
    assert messages[0] == messages[1]
    assert "worker 0 calls the model where worker 1 is in backward()" in messages[0]


def test_whole_state_has_all_names_and_other_parts_are_absent() -> None:
    whole, inputs = model_and_inputs()
    state = whole.state_dict()

    def work(ranks: Ranks) -> tuple[list[str], bool, str, dict[str, Any]]:
        model, _ = model_and_inputs()
        made = spread(ranks, model, inputs, SplitName(2, 1))
        optimizer = made.optimizer  # type: ignore[attr-defined]
        replica = Replica(made.own, optimizer, optimizer)
        block = torch.zeros(replica.layout.block_bytes, dtype=torch.uint8)
        replica.write_to(block)
        made.version = lambda: 0
        made.lay_out(replica.layout, lambda: (block, None))
        made.whole.standing.stands(0)
        said = ""
        if ranks.everyone.rank == 1:  # alone, while the other worker does something else
            found = model.state_dict()
            assert all(torch.equal(found[name], state[name]) for name in state)
            shapes = made.shapes()
            assert [(name, one.shape, one.dtype) for name, one in shapes.items()] == [
                (name, one.shape, one.dtype) for name, one in state.items()
            ]
            assert all(torch.equal(made.read(name), state[name]) for name in state)
        else:
            with pytest.raises(ConfigError) as refused:
                sum(float(parameter.norm()) for parameter in model.parameters())
            said = str(refused.value)
        ranks.everyone.all_gather(torch.zeros(1), torch.zeros(2)).wait()
        names = list(model.state_dict())
        around = nn.ModuleDict({"net": model}).state_dict()
        assert list(around) == [f"net.{name}" for name in state]
        assert all(torch.equal(around[f"net.{name}"], state[name]) for name in state)
        is_same = sum(parameter.numel() for parameter in model.parameters()) == sum(
            parameter.numel() for parameter in whole.parameters()
        )
        plain = made.optimizer_state(0, optimizer)
        ranks.everyone.all_gather(torch.zeros(1), torch.zeros(2)).wait()
        made.close()
        return names, is_same, said, plain

    for names, is_same, said, plain in in_threads(2, work):
        assert names == list(state)
        assert is_same
        assert not said or "is on worker 1" in said
        assert plain["param_groups"][0]["params"] == list(range(len(list(whole.parameters()))))


class Averaging(nn.Module):
    """Accepts series of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))).mean(1)


def test_rows_of_another_size_are_refused_by_all() -> None:
    x = torch.randn(8, 12, 6, dtype=torch.float64)

    def work(ranks: Ranks) -> list[str]:
        model, said = Averaging(), []
        made = spread(ranks, model, (x,), SplitName(2, 1))
        for length in (5, 20):
            mine = x.repeat(1, 2, 1)[:, :length] if ranks.everyone.rank else x
            with pytest.raises(ConfigError) as refused, torch.no_grad():
                model(mine)
            said.append(str(refused.value))
        with pytest.raises(ConfigError) as refused, torch.no_grad():  # one evaluates, one serves
            model(x[:, :5]) if ranks.everyone.rank else made.come_to_end()
        return [*said, str(refused.value)]

    said = in_threads(2, work)
    assert said[0] == said[1]
    for one, size in zip(said[0], (5, 20, 5), strict=True):
        assert one.startswith("worker 1 calls the model with a tensor, number 0 ")
        assert f" of size {size} in dimension 1, " in one


def test_varying_batch_and_border_sizes_are_refused() -> None:
    x = torch.randn(8, 12, 6, dtype=torch.float64)

    def cut(ranks: Ranks) -> None:
        make_cut(
            Averaging(), lambda size: (x[:size, : 5 + size],), 4, ranks, SplitName(2, 1),
            lambda *_: 1.0,
        )  # fmt: skip

    with pytest.raises(ConfigError, match=r"batches of \[2, 7, 6\] and of \[3, 8, 6\]"):
        in_threads(2, cut)
    shape = TensorShape(torch.float64, (0, 6), (2, 0))
    refuse_other_sizes([torch.zeros(6, 6, dtype=torch.float64)], [shape], 3)
    for odd in (torch.zeros(6, 5, dtype=torch.float64), torch.zeros(6, 6)):
        with pytest.raises(ConfigError, match="sizes that depend on the data"):
            refuse_other_sizes([odd], [shape], 3)


class Scaled(nn.Module):
    """Its output depends on the other samples of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) - x.mean())


class OwnFlag(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(nn.functional.dropout(self.first(x), 0.5, self.training))


class Choosing(Scaled):
    """Chooses its layers by its data."""

    def forward(self, x: Tensor) -> Tensor:
        if bool(x.sum() > 0):
            return self.second(self.first(x))
        return self.second(x)


class Calibrated(nn.Module):
    """Its buffer is nan until the first training pass."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.full((6,), torch.nan).double())

    def forward(self, x: Tensor) -> Tensor:
        self.seen.copy_(x.detach()[0] * 0.0 + 1.0)
        return x.tanh()


def calibrated() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), Calibrated(), nn.Linear(6, 3)).double()


def spectral() -> nn.Module:
    first = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))
    return nn.Sequential(first, nn.Tanh(), nn.Linear(6, 3)).double()


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()


def unnormed() -> nn.Module:
    model = normed()
    model[1] = nn.BatchNorm1d(6, track_running_stats=False).double()
    return model


@pytest.mark.parametrize(
    ("make", "parts", "words"),
    [
        (spectral, 2, "0.parametrizations.weight.0._u: a buffer that each forward pass"),
        (calibrated, 2, "1.seen: a buffer that each forward pass"),
        (Scaled, 2, "returns something else for a batch than for its halves"),
        (unnormed, 2, "1: batch norm without running statistics looks at the whole batch"),
        (OwnFlag, 2, "self.training"),
        (lambda: nn.Sequential(nn.Linear(6, 3)).double(), 2, "has 1 piece that can be cut apart"),
        (Choosing, 2, "control flow"),
    ],
)
def test_unsupported_models_are_refused_before_they_run(
    make: Callable[[], nn.Module], parts: int, words: str
) -> None:
    _, (x, _) = model_and_inputs()

    with pytest.raises(ConfigError) as refused:
        in_threads(1, lambda ranks: make_cut(
            make(), lambda size: (x[:size],), 4, ranks, SplitName(parts, 1), lambda *_: 1.0
        ))  # fmt: skip
    assert words in str(refused.value)


def test_frozen_layers_stay_frozen_and_unfrozen_ones_are_refused() -> None:
    _, (x, _) = model_and_inputs()

    def work(ranks: Ranks) -> tuple[list[bool], str]:
        model = normed().append(nn.Dropout(0.5))
        model[1].eval()
        model[3].eval()
        made = spread(ranks, model, (x,), SplitName(2, 1))
        modes = [one.training for one in model]
        assert torch.equal(model(x).detach(), model(x).detach())
        made.come_to_end()
        with pytest.raises(ConfigError) as refused:
            model.train()(x)
        return modes, str(refused.value)

    for modes, message in in_threads(2, work):
        assert modes == [True, False, True, False]
        assert message.startswith("1: batch norm looks at the whole batch")
        assert "freeze it by .eval()" in message


class NormedTwice(nn.Module):
    """A layer that is called twice stays in one part, with its running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.second(self.norm(self.first(x))))


@pytest.mark.parametrize("make", [normed, NormedTwice])
def test_batch_norm_takes_whole_mini_batches_as_if_gradients_were_accumulated(
    make: Callable[[], nn.Module],
) -> None:
    """Outputs, gradients, and the mean of the statistics of a copy for each worker."""
    _, (x, _) = model_and_inputs()
    start = in_own_random(make)
    whole, shares = copy.deepcopy(start), x[:9].split((5, 4))
    copies = [copy.deepcopy(start) for _ in shares]
    outputs = [whole(share) for share in shares]
    for one, share in zip(copies, shares, strict=True):
        one(share)
    for y in outputs:
        (y.square().mean() / 2).backward()  # workers have 4 samples each by their lease

    def work(ranks: Ranks) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        model = copy.deepcopy(start)
        made = spread(ranks, model, (x,), SplitName(2, 1))
        y = model(shares[ranks.everyone.rank])
        y.square().mean().backward()
        made.come_to_end()
        assert made.changed_buffers == 0
        made.norms.average([5, 4])
        grads = {
            name: one.grad for name, one in made.own.named_parameters() if one.grad is not None
        }
        return y.detach(), grads, {name: one.clone() for name, one in made.own.named_buffers()}

    results = in_threads(2, work)
    grads = {name: grad for _, some, _ in results for name, grad in some.items()}
    buffers = {name: buffer for *_, some in results for name, buffer in some.items()}
    assert all(close_to(y, expected) for (y, *_), expected in zip(results, outputs, strict=True))
    assert grads.keys() == dict(whole.named_parameters()).keys()
    assert all(close_to(grads[name], one.grad) for name, one in whole.named_parameters())
    assert buffers.keys() == dict(whole.named_buffers()).keys()
    for name, buffer in buffers.items():
        first, second = (one.get_buffer(name) for one in copies)
        assert close_to(buffer, (5 * first + 4 * second) / 9 if buffer.ndim else first), name


def test_frozen_buffer_is_refused_once_it_trains() -> None:
    _, (x, _) = model_and_inputs()

    def work(ranks: Ranks) -> str:
        model = spectral()
        model[0].eval()
        made = spread(ranks, model, (x,), SplitName(2, 1))
        model(x)
        made.come_to_end()
        with pytest.raises(ConfigError) as refused:
            model.train()(x)
        return str(refused.value)

    for message in in_threads(2, work):
        assert message.startswith("0.parametrizations.weight.0: a buffer that each forward pass")


def test_later_hooks_and_unfit_rows_are_refused() -> None:
    _, inputs = model_and_inputs()

    def work(ranks: Ranks) -> list[str]:
        model, _ = model_and_inputs()
        made = spread(ranks, model, inputs, SplitName(2, 1))
        calls = [
            lambda: model(inputs[0], inputs[1][:3]),
            lambda: model(inputs[0]),
            lambda: model(inputs[0], mask=inputs[1]),
            lambda: model(inputs[0].float(), inputs[1]),
            lambda: model(inputs[0].clone().requires_grad_(), inputs[1]),
        ]
        said = []
        for call in calls:
            with pytest.raises(ConfigError) as refused:
                call()
            said.append(str(refused.value))
        handle = model.get_submodule("out").register_forward_hook(lambda *_: None)
        with pytest.raises(ConfigError) as refused:
            model(*inputs)
        said.append(str(refused.value))
        handle.remove()
        model(*inputs)
        made.come_to_end()
        return said

    for said in in_threads(2, work):
        words = ("a row for each sample", "cut for 2 tensors", "and mask", "float32", "require")
        for one, word in zip(said, (*words, "layer 'out' has a hook"), strict=True):
            assert word in one


def test_unexpected_imbalance_is_reported_with_its_cost() -> None:
    _, inputs = model_and_inputs()

    def work(ranks: Ranks) -> list[tuple[str, float] | None]:
        model, _ = model_and_inputs()
        made = spread(ranks, model, inputs, SplitName(2, 1))
        said = [made.passed()]  # before any step
        for busy in ((1.0, 1.0), (1.0, 9.0), (1.0, 9.0)):
            made._pipeline.busy_s = busy[ranks.everyone.rank]  # type: ignore[attr-defined]
            made.cut = replace(made.cut, balance=0.95)  # type: ignore[attr-defined]
            said.append(made.passed())
        return said

    first, second = in_threads(2, work)
    assert second == [None] * 4
    assert first[:2] == [None, None]
    for told, times in zip(first[2:], (1, 2), strict=True):
        assert told is not None
        text, lost_s = told
        assert "busy 10% | 90% of the time: balance 56%, predicted 95%" in text
        assert lost_s == pytest.approx(times * (9.0 - 5.0 / 0.95))


def test_slow_worker_gets_fewer_layers() -> None:
    def work(ranks: Ranks) -> tuple[tuple[int, ...], list[int], str]:
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(12)))
        x, is_slow = torch.zeros(64, 256), ranks.everyone.rank == 0
        cut = make_cut(
            model, lambda size: (x[:size],), 32, ranks, SplitName(2, 1),
            lambda *_: 0.003 if is_slow else 0.001,  # so short that 32 samples are measured
        )  # fmt: skip
        return cut.order, [len(part.parameters) for part in cut.parts], cut.note

    first, second = in_threads(2, work)
    assert first == second
    order, sizes, note = first
    assert sorted(order) == [0, 1]
    of_slow, of_fast = (sizes[order.index(worker)] for worker in (0, 1))
    assert of_slow < of_fast
    assert "workers' speeds, part by part" in note


@pytest.mark.parametrize("others", [1, 4])
def test_workers_that_share_a_core_are_measured_one_after_another(
    monkeypatch: pytest.MonkeyPatch, others: int
) -> None:
    """Else one of them would seem slow because it waited for the core; also if only the machine of
    one has as few cores."""
    first = iter([1])
    monkeypatch.setattr(
        "paceline.spread.cut.num_cores", lambda: next(first, others) * torch.get_num_threads()
    )
    measuring, together = [0], list[int]()

    def seconds(*_: object) -> float:
        measuring[0] += 1
        together.append(measuring[0])
        time.sleep(0.05)  # so that another would begin meanwhile
        measuring[0] -= 1
        return 1.0

    def work(ranks: Ranks) -> None:
        model, x = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), torch.zeros(8, 8)
        make_cut(model, lambda size: (x[:size],), 8, ranks, SplitName(2, 1), seconds)

    in_threads(2, work)
    assert together == [1, 1]


def test_slow_worker_still_gets_layers_with_parameters() -> None:
    def work(ranks: Ranks) -> list[int]:
        layers = (one for _ in range(6) for one in (nn.Linear(64, 64), nn.Tanh()))
        x, is_slow = torch.zeros(64, 64), ranks.everyone.rank == 0
        cut = make_cut(
            nn.Sequential(*layers), lambda size: (x[:size],), 32, ranks, SplitName(2, 1),
            lambda *_: 90.0 if is_slow else 1.0,
        )  # fmt: skip
        return [len(cut.parts[cut.order.index(worker)].parameters) for worker in (0, 1)]

    first, second = in_threads(2, work)
    assert first == second
    of_slow, of_fast = first
    assert 2 <= of_slow < 6 < of_fast


def test_inputs_of_the_model_are_captured_without_computing() -> None:
    model, (x, mask) = model_and_inputs()
    result = inputs_of(model, lambda net, batch: loss_of(net(*batch)), (x, mask))
    assert result[0] is x
    assert result[1] is mask
    with pytest.raises(ConfigError, match="tensors alone"):
        inputs_of(model, lambda net, batch: net(x, mask=mask), x)
    with pytest.raises(ConfigError, match="not called"):
        inputs_of(model, lambda net, batch: x.sum(), x)


def test_part_is_served_at_the_requested_version() -> None:
    standing, seen = PartVersion(), list[int]()
    standing.stands(3)
    standing.changes()

    def ask() -> None:
        with standing.at(4):
            seen.append(4)

    asker = threading.Thread(target=ask, daemon=True)
    asker.start()
    assert not seen
    standing.stands(4)
    asker.join(10)
    assert seen == [4]


def test_push_not_weighted_by_samples_is_refused() -> None:
    averaging = object.__new__(SplitAveraging)
    averaging._spread = Weighed()  # type: ignore[assignment]
    averaging._check_shares([0.3, 0.1], 0.4)
    with pytest.raises(ConfigError, match=r"step.weight is not supported"):
        averaging._check_shares([0.2, 0.2], 0.4)


class Weighed:
    """A spread model whose gradients have these weights."""

    def take_shares(self) -> list[float]:
        return [0.75, 0.25]


def test_micro_batches_of_workers_take_turns() -> None:
    chunks = chunks_of([3, 0, 5], [(0.5, 0.5)] * 3, in_turns=True)
    assert [(chunk.owner, chunk.rows) for chunk in chunks] == [(0, 2), (2, 3), (0, 1), (2, 2)]
    chunks = chunks_of([3, 0, 5], [(0.5, 0.5)] * 3, in_turns=False)
    assert [(chunk.owner, chunk.rows) for chunk in chunks] == [(0, 2), (0, 1), (2, 3), (2, 2)]
    assert sum(chunk_rows(7, (0.2, 0.4, 0.4))) == 7
    assert chunk_rows(4, (0.01, 0.01, 0.98)) == [1, 1, 2]
    assert chunk_rows(2, (0.1, 0.1, 0.8)) == [1, 1]
    assert PartTask.STEP_END == 0


def test_mode_of_the_others_applies_only_during_a_pass() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Dropout())
    trains = module_mode(model.train())
    model.eval()
    with in_mode(model, trains):
        assert all(module.training for module in model.modules())
    assert not any(module.training for module in model.modules())
    model[1].train()
    mix = module_mode(model)
    model.eval()
    refused = pytest.raises(ConfigError, match="modules that are in training mode differ")
    with refused, in_mode(model, mix):
        pass


def chained() -> nn.Sequential:
    """Its first and last layer share a weight, so two parts have it."""
    layers = [nn.Linear(6, 6, bias=False), nn.Tanh(), nn.Linear(6, 6), nn.Tanh()]
    model = nn.Sequential(*layers, nn.Linear(6, 6, bias=False)).double()
    model[4].weight = model[0].weight
    return model


def count_gradients(made: SpreadModel) -> None:
    """Count gradients as a run does."""
    count = [0]

    def note(_: Tensor) -> None:
        count[0] += 1

    for parameter in made.own.parameters():
        parameter.register_post_accumulate_grad_hook(note)
    made.num_hooked = lambda: count[0]


def test_penalty_on_a_tied_weight_is_refused() -> None:
    _, (x, _) = model_and_inputs()

    def work(ranks: Ranks) -> str:
        model = in_own_random(chained)
        made = spread(ranks, model, (x,), SplitName(2, 1))
        assert made.shared == {"0.weight"}
        loss = model(x[:4]).mean()
        with pytest.raises(ConfigError) as refused:
            (loss + model[0].weight.pow(2).sum()).backward()
        return str(refused.value)

    for message in in_threads(2, work):
        assert "parameter '0.weight' gets a gradient that does not come through model(x)" in message


def test_penalty_on_parts_without_a_mini_batch_is_refused() -> None:
    _, inputs = model_and_inputs()

    def work(ranks: Ranks) -> str:
        model, _ = model_and_inputs()
        made = spread(ranks, model, inputs, SplitName(2, 1))
        count_gradients(made)
        own = [one for name, one in made.own.named_parameters() if name not in made.shared]
        for _ in range(2):  # both have their gradients
            loss = loss_of(model(*(one[:4] for one in inputs)))
            (loss + torch.stack([one.pow(2).sum() for one in own]).sum()).backward()
            made.come_to_end(End.PUSH, 4)
        if ranks.everyone.rank == 0:
            loss = loss_of(model(*(one[:4] for one in inputs)))
            (loss + torch.stack([one.pow(2).sum() for one in own]).sum()).backward()
            made.come_to_end(End.PUSH, 4)
            return ""
        with pytest.raises(ConfigError) as refused:
            made.come_to_end(End.PUSH, 0)
        return str(refused.value)

    first, second = in_threads(2, work)
    assert not first
    assert "in this update worker 1 has no mini-batch whose loss gives these to its part" in second


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_penalty_on_shards_without_a_mini_batch_is_refused(stage: int) -> None:
    _, inputs = model_and_inputs()

    def work(ranks: Ranks) -> str:
        model, rank = model_and_inputs()[0], ranks.everyone.rank
        made = sharded(ranks, model, stage, inputs)
        count_gradients(made)

        def train(weight: float) -> None:
            loss = loss_of(model(*(one[:4] for one in inputs)))
            squares = torch.stack(
                [parameter.pow(2).sum() for parameter in made.own.parameters()]
            ).sum()
            (loss + weight * squares if weight else loss).backward()

        for weight in (0.1, 0.1, 0.0):  # all have gradients, then one alone without a penalty
            if rank == 0 or weight:
                train(weight)
            made.come_to_end(End.PUSH, 4 if rank == 0 or weight else 0)
        if rank == 0:
            train(0.1)
            made.come_to_end(End.PUSH, 4)
            return ""
        with pytest.raises(ConfigError) as refused:
            made.come_to_end(End.PUSH, 0)
        return str(refused.value)

    first, second = in_threads(2, work)
    assert not first
    assert "in this update worker 1 has no mini-batch whose loss gives these to its part" in second


def loss_with_layer_output(model: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
    """A loss that also uses the output of a layer."""
    seen: list[Tensor] = []
    handle = model.get_submodule("blocks.0").register_forward_hook(lambda *a: seen.append(a[2]))
    loss = loss_of(model(x, mask)) + seen[0].pow(2).mean()
    handle.remove()
    return loss


def sharded(ranks: Ranks, model: nn.Module, stage: int, inputs: Any) -> ShardedModel:
    groups = SplitGroups(ranks, SplitName(ranks.everyone.size, 1, stage))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ShardedModel(
        model, [optimizer], groups, stage, lambda: model(*(x[:4] for x in inputs)), lambda: 4
    )


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_shard_gradients_are_weighted_for_any_backward_call(stage: int) -> None:
    whole, (_, inputs) = in_own_random(Attending), model_and_inputs()
    given = [[one[:4], one[4:8]] for one in inputs]
    losses = [loss_with_layer_output(whole, *(one[i] for one in given)) for i in range(2)]
    (torch.stack(losses).sum() / 2).backward()
    x = inputs[0][:4].clone().requires_grad_()
    loss_of(whole(x, inputs[1][:4])).backward(inputs=[x])

    def work(ranks: Ranks) -> dict[str, tuple[int, Any]]:
        model, rank = copy.deepcopy(whole), ranks.everyone.rank
        model.zero_grad()
        made = sharded(ranks, model, stage, inputs)
        loss_with_layer_output(model, *(one[rank] for one in given)).backward()
        made.come_to_end()
        grads = {
            name: (made.starts[name], None if one.grad is None else one.grad.clone())
            for name, one in made.own.named_parameters()
        }
        mine = inputs[0][:4].clone().requires_grad_()
        loss_of(model(mine, inputs[1][:4])).backward()
        assert mine.grad is not None
        assert x.grad is not None
        assert close_to(mine.grad, x.grad)
        made.come_to_end()
        with pytest.raises(ConfigError, match="create_graph=True"):
            loss_of(model(mine, inputs[1][:4])).backward(create_graph=True)
        return grads

    results = in_threads(2, work)
    for name, parameter in whole.named_parameters():
        if parameter.grad is not None:
            held = sorted(
                (result[name] for result in results if name in result), key=lambda one: one[0]
            )
            assert close_to(torch.cat([one for _, one in held]), parameter.grad.reshape(-1)), name


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_loss_of_a_single_layer_is_refused_with_shards(stage: int) -> None:
    _, inputs = model_and_inputs()

    def work(ranks: Ranks) -> None:
        model, seen = in_own_random(Attending), list[Tensor]()
        sharded(ranks, model, stage, inputs)
        layer = model.get_submodule("blocks.0")
        layer.register_forward_hook(lambda *given: seen.append(given[2]))
        model(*inputs)
        with pytest.raises(ConfigError, match="otherwise than through what model"):
            seen[0].pow(2).mean().backward()

    in_threads(2, work)


class Positions(nn.Module):
    """Returns a view of its own parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(1, 8, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.table[:, : x.shape[1]]


class Placed(nn.Module):
    """The whole model also returns a parameter itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions, self.head = nn.Linear(6, 6), Positions(), nn.Linear(6, 3)
        self.prototypes = nn.Parameter(torch.randn(4, 3))
        self.double()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.embed(x).unsqueeze(1).expand(-1, 2, -1)
        out = self.head((hidden + self.positions(hidden)).sin().mean(1))
        return {"out": out, "hidden": self.prototypes[:2], "whole": self.prototypes}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_returned_parameters_outlive_the_gathered_units(stage: int) -> None:
    whole, (_, (x, _)) = in_own_random(Placed), model_and_inputs()
    rows = [x[:4], x[4:8]]

    def loss(model: nn.Module, number: int) -> Tensor:
        made = model(rows[number])
        return loss_of(made) + made["whole"].cos().mean()

    (torch.stack([loss(whole, number) for number in range(2)]).sum() / 2).backward()

    def work(ranks: Ranks) -> dict[str, tuple[int, Any]]:
        model = copy.deepcopy(whole)
        model.zero_grad()
        made = sharded(ranks, model, stage, (x,))
        loss(model, ranks.everyone.rank).backward()
        made.come_to_end()
        with torch.no_grad():
            seen, expected = model(x), whole(x)
        made.come_to_end()
        assert all(close_to(seen[name], expected[name]) for name in expected)
        return {name: (made.starts[name], one.grad) for name, one in made.own.named_parameters()}

    actual = in_threads(2, work)
    for name, parameter in whole.named_parameters():
        assert parameter.grad is not None
        held = sorted((one[name] for one in actual if name in one), key=lambda one: one[0])
        assert close_to(torch.cat([one for _, one in held]), parameter.grad.reshape(-1)), name


def renew(weight: nn.Parameter) -> None:
    weight.data = weight.data.clamp(min=0)


WRITES: dict[str, Callable[[nn.Parameter], object]] = {
    "in place": lambda weight: weight.clamp_(min=0),
    "behind torch's back": lambda weight: weight.data.clamp_(min=0),
    "other memory": renew,
}


class Positive(nn.Linear):
    """A layer that makes its weights positive, as monotone layers do."""

    write: Callable[[nn.Parameter], object] = WRITES["in place"]

    def forward(self, given: Tensor) -> Tensor:
        with torch.no_grad():
            type(self).write(self.weight)
        return super().forward(given)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("way", [*WRITES, "a maximal norm"])
def test_layer_that_changes_its_own_weights_is_refused(
    stage: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.arange(48).view(8, 6) % 5
    if way in WRITES:
        monkeypatch.setattr(Positive, "write", WRITES[way])
        x = x.double()

    def work(ranks: Ranks) -> str:
        first = Positive(6, 6) if way in WRITES else nn.Embedding(5, 6, max_norm=1.0)
        model = nn.Sequential(first, nn.Tanh(), nn.Linear(6, 3)).double()

        def train() -> None:
            made = sharded(ranks, model, stage, (x,))
            for one in made.own.parameters():
                one.data.sub_(1.0)
            made.stepped()
            model(x)

        with pytest.raises(ConfigError) as refused:
            train()
        return str(refused.value)

    for message in in_threads(2, work):
        assert message.startswith("parameter '0.weight' is changed by forward()"), message


@pytest.mark.parametrize("stage", [2, 3])
def test_sharded_layers_can_be_frozen_and_unfrozen(stage: int) -> None:
    whole, (_, inputs) = in_own_random(Attending), model_and_inputs()
    whole.get_parameter("frozen.weight").requires_grad_(True)
    whole.get_submodule("blocks").requires_grad_(False)
    loss_of(whole(*(one[:4] for one in inputs))).backward()

    def work(ranks: Ranks) -> dict[str, Any]:
        model = in_own_random(Attending)
        model.load_state_dict(whole.state_dict())
        made = sharded(ranks, model, stage, inputs)
        loss_of(model(*(one[:4] for one in inputs))).backward()
        made.come_to_end()
        for one in model.parameters():
            one.grad = None
        assert all(one.grad is None for one in made.own.parameters())
        model.get_parameter("frozen.weight").requires_grad = True
        model.get_submodule("blocks").requires_grad_(False)
        for _ in range(2):
            made.own.zero_grad()
            loss_of(model(*(one[:4] for one in inputs))).backward()
            made.come_to_end()
        return {
            name: (made.starts[name], one.grad, one.requires_grad)
            for name, one in made.own.named_parameters()
        }

    results = in_threads(2, work)
    for name, parameter in whole.named_parameters():
        held = sorted(
            (result[name] for result in results if name in result), key=lambda one: one[0]
        )
        assert all(trained == parameter.requires_grad for *_, trained in held), name
        if parameter.grad is None:
            assert all(one is None for _, one, _ in held), name
        else:
            pieces = torch.cat([one for _, one, _ in held])
            assert close_to(pieces, parameter.grad.reshape(-1)), name


def test_differing_first_passes_are_refused_before_an_exchange() -> None:
    _, inputs = model_and_inputs()

    class Dropping(Attending):
        drops = False

        def forward(self, x: Tensor, mask: Tensor) -> dict[str, Tensor]:
            hidden = self.embed(x) * self.scale
            for number, block in enumerate(self.blocks):
                if number or not self.drops:
                    hidden = hidden + block(hidden)
            return {"out": hidden, "hidden": hidden * mask}

    def work(ranks: Ranks) -> None:
        model = in_own_random(Dropping)
        sharded(ranks, model, 3, inputs)
        model.drops = ranks.everyone.rank == 1  # type: ignore[assignment]
        with pytest.raises(ConfigError, match="in different orders"):
            model(*inputs)

    in_threads(2, work)


class Heads(nn.Module):
    """Two heads, of which a loss may use one."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.left, self.right = (nn.Linear(6, 6) for _ in range(3))
        self.kind, self.box = nn.Linear(6, 3), nn.Linear(6, 2)
        self.double()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = torch.tanh(self.body(x))
        left, right = torch.tanh(self.left(x)), torch.tanh(self.right(x))
        return {"kind": self.kind(left), "box": self.box(right)}


@pytest.mark.parametrize("parts", [2, 3])
def test_outputs_unused_by_the_loss_get_no_gradient(parts: int) -> None:
    whole, (_, (x, _)) = in_own_random(Heads), model_and_inputs()
    whole(x[: 4 * parts])["kind"].pow(2).mean().backward()

    def work(ranks: Ranks) -> dict[str, Any]:
        model = copy.deepcopy(whole)
        model.zero_grad()
        made = spread(ranks, model, (x,), SplitName(parts, 1))
        model(x[: 4 * parts].chunk(parts)[ranks.everyone.rank])["kind"].pow(2).mean().backward()
        made.come_to_end()
        return {name: one.grad for name, one in made.own.named_parameters()}

    results = in_threads(parts, work)
    for name, parameter in whole.named_parameters():
        held = [result[name] for result in results if name in result]
        if parameter.grad is None:
            assert held == [None], name
        else:
            assert close_to(held[0], parameter.grad), name


class Words(nn.Module):
    """Gives a row for each word of a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 6), nn.Linear(6, 4)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x.view(-1, 2, 3)))).view(-1, 4)


def test_output_may_have_several_rows_and_be_changed_in_place() -> None:
    whole, (_, (x, _)) = in_own_random(Words), model_and_inputs()
    total = whole(x[:8])
    total[..., 0] = -1.0
    total.pow(2).mean().backward()

    def work(ranks: Ranks) -> dict[str, Any]:
        model = copy.deepcopy(whole)
        model.zero_grad()
        made = spread(ranks, model, (x,), SplitName(2, 1))
        out = model(x[:8].chunk(2)[ranks.everyone.rank])
        out[..., 0] = -1.0
        out.pow(2).mean().backward()
        made.come_to_end()
        return {name: one.grad for name, one in made.own.named_parameters()}

    results = in_threads(2, work)
    for name, parameter in whole.named_parameters():
        assert parameter.grad is not None
        assert close_to(
            next(result[name] for result in results if name in result), parameter.grad
        ), name


def test_output_of_shards_may_be_changed_in_place() -> None:
    _, inputs = model_and_inputs()

    def work(ranks: Ranks) -> None:
        model = in_own_random(Attending)
        made = sharded(ranks, model, 3, inputs)
        out = model(*inputs)["out"]
        out /= 2.0
        out.masked_fill_(inputs[1] > 0, -1.0)
        out.mean().backward()
        made.come_to_end()

    in_threads(2, work)


def test_pass_is_weighted_by_its_mini_batch() -> None:
    """Five samples in chunks of two are one more than four."""
    whole, (_, (x, _)) = in_own_random(Words), model_and_inputs()
    chunks = [x[:5].split(2), x[5:9].split(2)]
    for own, share in zip(chunks, (5 / 9, 4 / 9), strict=True):
        for one in own:
            (whole(one).pow(2).mean() * share / len(own)).backward()

    def work(ranks: Ranks) -> tuple[dict[str, Any], Any]:
        model, rank = copy.deepcopy(whole), ranks.everyone.rank
        model.zero_grad()
        made = spread(ranks, model, (x,), SplitName(2, 1))
        made._num_samples = lambda: 4 if rank else 5
        for one in chunks[rank]:
            (model(one).pow(2).mean() / len(chunks[rank])).backward()
        made.come_to_end(End.PUSH, 4 if rank else 5)
        return {name: one.grad for name, one in made.own.named_parameters()}, made.take_shares()

    results = in_threads(2, work)
    for name, parameter in whole.named_parameters():
        assert parameter.grad is not None
        assert close_to(next(one[name] for one, _ in results if name in one), parameter.grad), name
    assert [shares for _, shares in results] == [[5 / 9, 4 / 9]] * 2


def test_stale_graph_and_empty_call_are_refused() -> None:
    _, inputs = model_and_inputs()

    def work(ranks: Ranks) -> None:
        model, _ = model_and_inputs()
        made = spread(ranks, model, inputs, SplitName(2, 1))
        old = loss_of(model(*inputs))
        made.come_to_end()
        loss_of(model(*inputs)).backward()
        with pytest.raises(ConfigError, match="before the last step"):
            old.backward()
        with pytest.raises(ConfigError, match="called with no row"):
            model(*(one[:0] for one in inputs))
        made.come_to_end()

    in_threads(2, work)


def test_parameters_of_other_workers_can_be_frozen_and_unfrozen() -> None:
    _, inputs = model_and_inputs()

    def work(ranks: Ranks) -> None:
        model, _ = model_and_inputs()
        spread(ranks, model, inputs, SplitName(2, 1))
        model.requires_grad_(False)
        assert not any(parameter.requires_grad for parameter in model.parameters())
        for one in model.parameters():
            one.requires_grad, one.grad = True, None
        assert all(parameter.requires_grad for parameter in model.parameters())
        with pytest.raises(ConfigError, match="here grad reads its values"):
            [parameter.grad for parameter in model.parameters()]

    in_threads(2, work)


@pytest.mark.parametrize(
    ("hook", "is_right"),
    [
        (lambda g: g * 0.5, True),
        (lambda g: None, True),
        (lambda g: g.clamp(-1.0, 1.0), False),
        (lambda g: g / g.norm(), False),
    ],
)
def test_nonlinear_parameter_hooks_are_refused(
    hook: Callable[[Tensor], Tensor | None], is_right: bool
) -> None:
    weight = nn.Parameter(torch.ones(3, 4))
    weight.register_hook(hook)
    if is_right:
        refuse_uneven_hooks([("fc.weight", weight)])
        return
    with pytest.raises(ConfigError, match=r"parameter 'fc.weight' has a hook that is not linear"):
        refuse_uneven_hooks([("fc.weight", weight)])


def test_gradients_scaled_by_counts_are_refused() -> None:
    x = torch.arange(12) % 5
    model = nn.Sequential(nn.Embedding(5, 4, scale_grad_by_freq=True), nn.Linear(4, 2)).double()

    def work(ranks: Ranks) -> str:
        with pytest.raises(ConfigError) as refused:
            spread(ranks, copy.deepcopy(model), (x,), SplitName(2, 1))
        return str(refused.value)

    for message in in_threads(2, work):
        assert "'0' has scale_grad_by_freq" in message
        assert "--split data" in message


def test_passes_outside_the_loop_are_not_kept() -> None:
    """Nothing can go back through them, and an evaluation may have forgotten torch.no_grad()."""
    _, inputs = model_and_inputs()

    def work(ranks: Ranks) -> tuple[int, str]:
        model, _ = model_and_inputs()
        made = spread(ranks, model, inputs, SplitName(2, 1))
        made._num_samples = lambda: 0
        loss = loss_of(model(*(one[:4] for one in inputs)))
        with pytest.raises(ConfigError) as refused:
            loss.backward()
        assert isinstance(made, PipelinedModel)
        return len(made._passes), str(refused.value)

    for num_kept, message in in_threads(2, work):
        assert num_kept == 0
        assert "is called outside the loop" in message


def test_changed_attribute_and_replaced_layer_are_refused() -> None:
    _, (x, _) = model_and_inputs()

    class Warm(Words):
        def __init__(self) -> None:
            super().__init__()
            self.tau = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x.view(-1, 2, 3)) / self.tau).view(-1, 4)

    def work(ranks: Ranks) -> list[str]:
        model, said = in_own_random(Warm), []
        made = spread(ranks, model, (x,), SplitName(2, 1))
        model(x)
        made.come_to_end()
        for name, value in (("tau", 0.5), ("last", nn.Identity())):
            before = getattr(model, name)
            setattr(model, name, value)
            with pytest.raises(ConfigError) as refused:
                model(x)
            said.append(str(refused.value))
            if name == "last":
                with pytest.raises(ConfigError, match=r"parameter 'last.weight' was added to"):
                    made.passed()
            setattr(model, name, before)
        model(x)
        made.come_to_end()
        return said

    for tau, last in in_threads(2, work):
        assert "Warm.tau was 1.0 when Warm was split and is now 0.5" in tau
        assert "Warm.last was another Linear when Warm was split" in last


class Centered(Words):
    """A script moves its center by the samples it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(4, dtype=torch.float64))
        self.register_buffer("kept", torch.full((4,), 0.1, dtype=torch.float64))
        self.register_buffer("num", torch.zeros((), dtype=torch.int64))


def test_buffers_changed_by_a_script_are_averaged() -> None:
    _, (x, _) = model_and_inputs()

    def work(ranks: Ranks) -> tuple[int, nn.Module]:
        model, rank = in_own_random(Centered), ranks.everyone.rank
        made = spread(ranks, model, (x,), SplitName(2, 1))
        averaging = object.__new__(SplitAveraging)
        averaging._spread = made
        averaging._told_of_deaths = nullcontext  # type: ignore[method-assign,assignment]  # only what this looks at
        averaging._replica = SimpleNamespace(buffers=list(made.own.buffers()))  # type: ignore[assignment]  # only what this looks at
        model(x[:4]).mean().backward()
        model.get_buffer("center").add_(1.0 + rank)
        model.get_buffer("num").add_(3 - rank)
        made.come_to_end(End.PUSH, 4)
        found = made.changed_buffers
        averaging._reduce_changed(0.75 if rank else 0.25, 1.0)
        made.mark_buffers()
        made.come_to_end(End.PUSH, 4)
        return found + 100 * made.changed_buffers, model

    for found, model in in_threads(2, work):
        assert found == 0b101
        assert model.get_buffer("center").tolist() == [1.75] * 4
        assert model.get_buffer("kept").tolist() == [0.1] * 4
        assert int(model.get_buffer("num")) == 3


@pytest.mark.parametrize("way", ["in place", "anew", "other memory"])
def test_buffers_changed_by_a_script_are_averaged_over_copies(way: str) -> None:
    """Also in workers whose part has no buffers, and if a copy has changed nothing."""
    _, (x, _) = model_and_inputs()
    weights = (0.1, 0.2, 0.3, 0.4)

    def work(ranks: Ranks) -> nn.Module:
        model, rank = in_own_random(Centered), ranks.everyone.rank
        made = spread(ranks, model, (x,), SplitName(2, 2))
        averaging = object.__new__(SplitAveraging)
        averaging._spread, averaging._seat = made, rank
        averaging._told_of_deaths = nullcontext  # type: ignore[method-assign,assignment]  # only what this looks at
        averaging._replica = SimpleNamespace(buffers=list(made.own.buffers()))  # type: ignore[assignment]  # only what this looks at
        averaging._store = SimpleNamespace(present=lambda seat: bytes(3))  # type: ignore[assignment]  # only what this looks at
        assert made.groups.twins is not None
        averaging._group = made.groups.twins
        model(x[:4]).mean().backward()
        center = model.get_buffer("center")
        is_placed = any(buffer is center for buffer in made.own.buffers())
        if rank != 3 and way == "anew":
            model.center = center + (1.0 + rank)
        elif rank != 3 and way == "other memory" and not is_placed:
            center.data = center + (1.0 + rank)
        elif rank != 3:  # as the owner of this part's memory does, if it is another object
            center.add_(1.0 + rank)
        if rank < 2:
            model.get_buffer("num").add_(3 - rank)
        made.come_to_end(End.PUSH, 4)
        assert averaging._present_in_any(weights) == [0, 0, 0]
        assert made.changed_buffers == 0b101
        own = sum(weights[member] for member in made.groups.members)
        averaging._reduce_changed(weights[rank], own)
        averaging._reduce_buffers(own)
        assert model.get_buffer("center") is center
        return model

    for model in in_threads(4, work):
        assert model.get_buffer("center").tolist() == pytest.approx([1.4] * 4)
        assert model.get_buffer("kept").tolist() == pytest.approx([0.1] * 4)
        assert int(model.get_buffer("num")) == 3


def test_nonfinite_gradient_is_named_by_all() -> None:
    def work(ranks: Ranks) -> str:
        rank, mean = ranks.everyone.rank, torch.tensor([1.0, math.inf])
        place = SimpleNamespace(name=f"layer.{rank}", flat=lambda block: block[rank])
        places = SimpleNamespace(parameters=SimpleNamespace(places=[place]))
        averaging = object.__new__(SplitAveraging)
        averaging._spread = SimpleNamespace(groups=SimpleNamespace(copy=ranks.everyone))  # type: ignore[assignment]  # only what this looks at
        averaging._replica = SimpleNamespace(layout=places)  # type: ignore[assignment]  # only what this looks at
        own = SimpleNamespace(overlap_steps=0)
        averaging._copy = SimpleNamespace(version=7, own=own)  # type: ignore[assignment]  # only what this looks at
        averaging._mean, averaging._seat = mean, rank
        averaging._told_of_deaths = nullcontext  # type: ignore[method-assign,assignment]  # only what this looks at
        with pytest.raises(WorkerError) as refused:
            averaging._refuse_not_finite()
        return str(refused.value)

    for rank, message in enumerate(in_threads(2, work)):
        assert message.startswith(
            f"worker {rank}: the averaged gradient of 'layer.1' is not finite at version 7"
        )
