"""A model divided over channels computes and trains as it does alone.

Workers are threads over real gloo (tests/support/threaded.py), plus one set of real ranks.
"""

import copy
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import ConfigError
from paceline.exchange.base import End
from paceline.partition.names import SplitName
from paceline.replica.replica import Replica
from paceline.splits.channels import find_pairs
from paceline.splits.measuring import measure
from paceline.splits.tracing import TracedModel, trace
from paceline.spread.columns import PassRandom, columns_of, divisible_pairs
from paceline.spread.group import Ranks, SplitGroups
from paceline.spread.layered import ColumnModel, _is_random, make_columns
from ranks import Ended, free_port, run_alone
from runs import run_script
from threaded import close_to, in_threads

EXACT = 1e-9


def alexnet(dropout: float = 0.0) -> nn.Module:
    """A small AlexNet: convolutions, pools, wide layers; three pairs."""
    return nn.Sequential(
        nn.Conv2d(1, 5, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(5, 6, 3, padding=1), nn.ReLU(inplace=True),
        nn.Conv2d(6, 7, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(7 * 4, 9), nn.ReLU(), nn.Dropout(dropout),
        nn.Linear(9, 6), nn.ReLU(), nn.Dropout(dropout), nn.Linear(6, 3),
    ).double()  # fmt: skip


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 9), nn.Tanh(), nn.Linear(9, 8, bias=False), nn.GELU(), nn.Linear(8, 3)
    ).double()


def frozen_norm() -> nn.Module:
    """A model with a frozen batch norm, which has values per channel."""
    norm = nn.BatchNorm2d(5).eval()
    with torch.no_grad():
        for one in (norm.running_mean, norm.running_var, norm.weight, norm.bias):
            assert one is not None
            one.add_(torch.rand(5))
    return nn.Sequential(
        nn.Conv2d(1, 5, 3, padding=1), norm, nn.ReLU(),
        nn.Conv2d(5, 6, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 64, 3),
    ).double()  # fmt: skip


class Block(nn.Module):
    """A transformer block without attention: a norm, two layers per token, a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(8), nn.Linear(8, 11), nn.Linear(11, 8)
        self.out = nn.Linear(64, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.view(-1, 8, 8)
        tokens = tokens + self.second(nn.functional.gelu(self.first(self.norm(tokens))))
        return self.out(tokens.flatten(1))


class Tied(nn.Module):
    """Its two layers are one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.second.weight = self.first.weight
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    """Always the same values; made by one thread, since the generator is global."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return make()


def inputs_for(make: Callable[[], nn.Module], rows: int) -> Tensor:
    x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x if make in (mlp, Block) else x.view(rows, 1, 8, 8)


def optimizer_for(model: nn.Module) -> torch.optim.Optimizer:
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=1e-2)


def spread(ranks: Ranks, model: nn.Module, x: Tensor) -> tuple[ColumnModel, torch.optim.Optimizer]:
    groups = SplitGroups(ranks, SplitName(ranks.everyone.size, 1, is_layer=True))
    columns = make_columns(model, lambda size: (x[:size],), 4, groups)
    optimizer = optimizer_for(model)
    return ColumnModel(model, [optimizer], columns, groups, lambda: 4), optimizer


@pytest.mark.parametrize(
    ("make", "size"), [(alexnet, 2), (mlp, 2), (mlp, 3), (Block, 2), (frozen_norm, 2)]
)
def test_twenty_steps_equal_those_on_one_device(make: Callable[[], nn.Module], size: int) -> None:
    x, rows = inputs_for(make, 20 * 4 * size), 4 * size
    start = seeded(make)
    whole = copy.deepcopy(start)
    plain = optimizer_for(whole)
    for step in range(20):
        plain.zero_grad()
        whole(x[step * rows : (step + 1) * rows]).sin().mean().backward()
        plain.step()

    def work(ranks: Ranks) -> tuple[dict[str, Tensor], dict[str, tuple[int, ...]], Any]:
        model = copy.deepcopy(start)
        one, optimizer = spread(ranks, model, x)
        for step in range(20):
            optimizer.zero_grad()
            begin = step * rows + 4 * ranks.everyone.rank
            model(x[begin : begin + 4]).sin().mean().backward()
            one.come_to_end()
            optimizer.step()
        replica = Replica(one.own, optimizer, optimizer)
        block = torch.zeros(replica.layout.block_bytes, dtype=torch.uint8)
        replica.write_to(block)
        one.version = lambda: 0
        one.lay_out(replica.layout, lambda: (block, None))
        one.whole.standing.stands(0)
        state, groups = model.state_dict(), one.optimizer_state(0, optimizer)["param_groups"]
        assert all(torch.equal(one.read(name), value) for name, value in state.items())
        shapes = {name: tuple(piece.shape) for name, piece in one.own.named_parameters()}
        ranks.everyone.all_gather(torch.zeros(1), torch.zeros(size)).wait()
        one.close()
        return dict(state), shapes, groups

    results = in_threads(size, work)
    for state, _, groups in results:
        assert state.keys() == whole.state_dict().keys()
        for name, tensor in whole.state_dict().items():
            assert close_to(state[name], tensor, EXACT), name
        assert groups == plain.state_dict()["param_groups"]
    shapes = dict(whole.named_parameters())
    divided = [name for name, one in results[0][1].items() if one != tuple(shapes[name].shape)]
    assert len(divided) == (9 if make is alexnet else 3)
    for name in divided:
        sizes = [one[name] for _, one, _ in results]
        dim = next(d for d in range(len(sizes[0])) if sizes[0][d] != shapes[name].shape[d])
        assert sum(one[dim] for one in sizes) == shapes[name].shape[dim], name


def test_random_numbers_differ_only_in_divided_channels() -> None:
    """Undivided layers draw the same bits, whatever the state of each worker's generator."""
    drawn = []
    for rank in range(2):
        torch.manual_seed(rank)
        before, random = torch.get_rng_state(), PassRandom(rank)
        with random.begun(7):
            common = [torch.rand(3)]
            random.part()
            own = torch.rand(3 + rank)
            random.rejoin()
            common.append(torch.rand(3))
            random.part()
            other = torch.rand(3)
            random.rejoin()
        with random.begun(-1):  # a pass without random numbers
            random.part()
            random.rejoin()
        assert torch.equal(torch.get_rng_state(), before)
        drawn.append((torch.cat(common), own[:3], other))
    (common, own, other), (again, second, third) = drawn
    assert torch.equal(common, again)
    assert len({float(one[0]) for one in (common, own, other, second, third)}) == 5


def test_random_numbers_are_common_again_after_pairs_around_each_other() -> None:
    drawn = []
    for rank in range(2):
        random = PassRandom(rank)
        with random.begun(7):
            common = [torch.rand(3)]
            random.part()
            random.part()
            random.rejoin()
            own = torch.rand(3)  # the first or second pair is still open
            random.rejoin()
            common.append(torch.rand(3))
        drawn.append((torch.cat(common), own))
    (common, own), (again, other) = drawn
    assert torch.equal(common, again)
    assert not torch.equal(own, other)


def test_evaluation_disables_dropout() -> None:
    x, start = inputs_for(alexnet, 8), seeded(lambda: alexnet(0.5))

    def work(ranks: Ranks) -> tuple[bool, Tensor]:
        model = copy.deepcopy(start)
        one, _ = spread(ranks, model, x)
        model.eval()
        with torch.no_grad():
            looked = model(x)
        one.come_to_end()
        return one._columns.is_random, looked

    alone = copy.deepcopy(start).eval()
    for is_random, seen in in_threads(2, work):
        assert is_random
        assert close_to(seen, alone(x))


def test_worker_may_have_fewer_rows_or_none() -> None:
    x = inputs_for(mlp, 12)
    start = seeded(mlp)
    whole = copy.deepcopy(start)
    (whole(x[:5]).sin().mean() * 0.5).backward()  # of 4 samples per lease

    def work(ranks: Ranks) -> dict[str, Tensor | None]:
        model = copy.deepcopy(start)
        one, _ = spread(ranks, model, x)
        if ranks.everyone.rank == 0:
            model(x[:5]).sin().mean().mul(0.5).backward()
        one.come_to_end()
        return {name: held.grad for name, held in one.own.named_parameters()}

    first, second = in_threads(2, work)
    for name, parameter in whole.named_parameters():
        assert first[name] is not None
        assert second[name] is not None
        if first[name].shape == parameter.shape:  # type: ignore[union-attr]
            assert close_to(first[name], parameter.grad)  # type: ignore[arg-type]
            assert torch.equal(first[name], second[name])  # type: ignore[arg-type]


def test_reading_divided_parameters_is_refused_by_name() -> None:
    x, start = inputs_for(mlp, 8), seeded(mlp)

    def work(ranks: Ranks) -> str:
        model = copy.deepcopy(start)
        spread(ranks, model, x)
        with pytest.raises(ConfigError) as refused:
            sum(float(parameter.detach().norm()) for parameter in model.parameters())
        return str(refused.value)

    for message in in_threads(2, work):
        assert "parameter '0.weight' is in columns on all workers" in message


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Tied, "has no two layers in a row with channels for 2 workers"),
        (lambda: nn.Sequential(nn.Linear(64, 1), nn.ReLU(), nn.Linear(1, 3)).double(), "no two"),
        (lambda: nn.Sequential(nn.Linear(64, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double(),
         "batch norm looks at the whole batch"),
    ],
)  # fmt: skip
def test_indivisible_models_are_refused(make: Callable[[], nn.Module], words: str) -> None:
    x = inputs_for(mlp, 8)

    def work(ranks: Ranks) -> None:
        spread(ranks, make(), x)

    with pytest.raises(ConfigError) as refused:
        in_threads(2, work)
    assert words in str(refused.value)


def test_unequal_gradients_from_outside_the_model_are_refused() -> None:
    x, start = inputs_for(mlp, 8), seeded(mlp)

    def work(ranks: Ranks) -> str:
        model, count = copy.deepcopy(start), [0]
        one, optimizer = spread(ranks, model, x)
        one.num_hooked = lambda: count[0]
        for held in one.own.parameters():
            held.register_post_accumulate_grad_hook(lambda _: count.__setitem__(0, count[0] + 1))
        last = model.get_parameter("4.weight")
        for _ in range(2):  # a penalty is
            optimizer.zero_grad()
            (model(x[:4]).mean() + last.pow(2).sum()).backward()
            one.come_to_end(End.PUSH, 4)
        (model(x[:4]).mean() * last.mean() * (1.0 + ranks.everyone.rank)).backward()
        with pytest.raises(ConfigError) as refused:
            one.come_to_end(End.PUSH, 4)
        return str(refused.value)

    for message in in_threads(2, work):
        assert "parameter '4.weight', which all workers have whole, gets a gradient" in message


class Words(nn.Module):
    """Gives a row for each word of a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 9), nn.Linear(9, 4)
        self.double()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        made = self.second(torch.tanh(self.first(x.view(-1, 2, 32))))
        return made.view(-1, 4), made.mean(1)


def test_outputs_with_several_rows_per_sample_are_assigned() -> None:
    x, start = inputs_for(mlp, 8), seeded(Words)
    whole = copy.deepcopy(start)
    whole(x)[0].sin().mean().backward()

    def work(ranks: Ranks) -> dict[str, Tensor | None]:
        model, rank = copy.deepcopy(start), ranks.everyone.rank
        one, _ = spread(ranks, model, x)
        out, _ = model(x.chunk(2)[rank])
        assert close_to(out, whole(x.chunk(2)[rank])[0])
        out.sin_().mean().backward()
        one.come_to_end()
        return {name: held.grad for name, held in one.own.named_parameters()}

    for name, grad in in_threads(2, work)[1].items():
        expected = whole.get_parameter(name).grad
        assert grad is not None
        assert expected is not None
        dim = next((d for d in range(grad.ndim) if grad.shape[d] != expected.shape[d]), 0)
        start_at = expected.shape[dim] - grad.shape[dim]
        assert close_to(grad, expected.narrow(dim, start_at, grad.shape[dim])), name


def can_divide(traced: TracedModel, x: Tensor) -> bool:
    """Whether a model's only pair of layers can be divided over two workers."""
    graph = measure(traced, (x,)).graph
    assert len(find_pairs(traced, graph)) == 1
    return len(divisible_pairs(traced, graph, (x,), 2)) == 1


@pytest.mark.parametrize("num_workers", [2, 3])
def test_columns_of_absent_workers_add_up(num_workers: int) -> None:
    model = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    x = torch.randn(5, 4, dtype=torch.float64)
    traced = trace(model, (x,))
    pairs = divisible_pairs(traced, measure(traced, (x,)).graph, (x,), num_workers)
    assert [pair.nodes for pair in pairs] == [(0, 1, 2)]
    columns = [columns_of(traced, pairs, rank, num_workers) for rank in range(num_workers)]
    total = torch.stack([module(x) for module in columns]).sum(0)
    assert close_to(total - (num_workers - 1) * model[2].bias, model(x))
    assert sum(len(next(module.parameters())) for module in columns) == 7
    assert model[0].weight.shape == (7, 4)


def test_layer_with_weight_hooks_is_not_divided() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    x = torch.randn(5, 4, dtype=torch.float64)
    traced = trace(model, (x,))
    assert can_divide(traced, x)
    mask = (model[0].weight > 0).double()
    model[0].weight.register_hook(lambda gradient: gradient * mask)
    assert not can_divide(traced, x)


def test_columns_freeze_with_their_parameters() -> None:
    x, start = inputs_for(mlp, 8), seeded(mlp)

    def work(ranks: Ranks) -> list[bool]:
        model = copy.deepcopy(start)
        one, _ = spread(ranks, model, x)
        model.get_submodule("0").requires_grad_(False)
        return [held.requires_grad for _, held in one.own.named_parameters()]

    assert in_threads(2, work) == [[False, False, True, True, True]] * 2


class Towers(nn.Module):
    """Two towers, written tower after tower or statement by statement, perhaps with dropout."""

    def __init__(self, *, is_interleaved: bool, rate: float) -> None:
        super().__init__()
        self.is_interleaved, self.drop = is_interleaved, nn.Dropout(rate)
        self.a1, self.a2 = nn.Linear(4, 6), nn.Linear(6, 3)
        self.b1, self.b2 = nn.Linear(4, 6), nn.Linear(6, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        if self.is_interleaved:
            a = self.a1(x)
            b = self.b1(self.drop(x))
            a, b = self.a2(torch.relu(a)), self.b2(torch.relu(b))
        else:
            a = self.a2(torch.relu(self.a1(x)))
            b = self.b2(torch.relu(self.b1(self.drop(x))))
        return a + b


@pytest.mark.parametrize(
    ("is_interleaved", "rate", "num_pairs"), [(False, 0.5, 2), (True, 0.5, 1), (True, 0.0, 2)]
)
def test_a_pair_is_not_divided_around_another_random_number(
    is_interleaved: bool, rate: float, num_pairs: int
) -> None:
    """Each worker would draw another one."""
    model = Towers(is_interleaved=is_interleaved, rate=rate)
    x = torch.randn(5, 4, dtype=torch.float64)
    traced = trace(model, (x,))
    graph = measure(traced, (x,)).graph
    assert len(find_pairs(traced, graph)) == 2
    assert len(divisible_pairs(traced, graph, (x,), 2)) == num_pairs


def test_model_drawing_from_other_generators_is_refused() -> None:
    class Noisy(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * random.uniform(0.99, 1.01))

    x = inputs_for(mlp, 8)
    model = nn.Sequential(nn.Linear(64, 9), nn.Tanh(), nn.Linear(9, 64), Noisy()).double()
    with pytest.raises(ConfigError, match="draws random numbers from Python's or NumPy's"):
        _is_random(model, (x,))


def test_pair_whose_columns_do_not_sum_is_not_divided() -> None:
    """Flattening between them does not keep channels together."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Flatten(), nn.Linear(18, 2)).double()
    x = torch.randn(5, 3, 4, dtype=torch.float64)
    traced = trace(model, (x,))
    assert not can_divide(traced, x)
    other = nn.Sequential(nn.Conv1d(3, 6, 1), nn.Flatten(), nn.Linear(24, 2)).double()
    traced = trace(other, (x,))
    assert can_divide(traced, x)


SCRIPT = """
import os, pathlib, signal, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import paceline

pace = paceline.connect()
torch.manual_seed(3)
generator = torch.Generator().manual_seed(1)
inputs = torch.randn(120, 1, 8, 8, generator=generator, dtype=torch.float64)
targets = (inputs.mean((1, 2, 3)) > 0).long()
model = nn.Sequential(
    nn.Conv2d(1, 5, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(5, 4, 3), nn.ReLU(),
    nn.Flatten(), nn.Linear(16, 9), nn.Tanh(), nn.Linear(9, 2),
).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-2)
loader = DataLoader(TensorDataset(inputs, targets), batch_size=12, shuffle=True)
model, optimizer, loader = pace.prepare(model, optimizer, loader)
for epoch in pace.epochs(2):
    for x, y in loader:
        with pace.step():
            if os.environ.get("KILLED", "-") == os.environ.get("RANK") and pace.version == 14:
                written = pathlib.Path(os.environ["PACELINE_RUN_DIR"], "checkpoints", "latest")
                for _ in range(600):  # another process writes it
                    if written.exists():
                        break
                    time.sleep(0.05)
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            pace.clip_grad_norm_(model.parameters(), 0.2)
            optimizer.step()
    total = pace.evaluate(lambda batch: {"sum": (float(model(batch[0]).sum()), 1.0)}, loader)
    pace.print(f"version {pace.version} sum {total['sum'][0]:.9f}")
pace.save()
"""


def by_two_ranks(folder: Path, **settings: str) -> Ended:
    """Run the script in two processes, as mpirun starts them; return the output of all."""
    folder.mkdir(exist_ok=True)
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    world = {**settings, **meet, "OMPI_COMM_WORLD_SIZE": "2", "PACELINE_SPLIT": "layer"}
    ended = run_alone(
        folder,
        [{**world, "OMPI_COMM_WORLD_RANK": str(one), "RANK": str(one)} for one in range(2)],
        SCRIPT,
    )
    return Ended(
        folder=folder,
        code=max(abs(one.code) for one in ended),
        said="".join(one.said for one in ended),
        took_s=max(one.took_s for one in ended),
    )


@pytest.mark.timeout(150)
def test_ranks_equal_one_worker_and_share_its_checkpoints(tmp_path: Path) -> None:
    """Columns of momentum, too: both resume from a killed run."""
    folder = tmp_path / "split"
    died = by_two_ranks(folder, PACELINE_CHECKPOINT_EVERY="1 epoch", KILLED="1")
    assert died.code != 0
    assert len([line for line in died.errors if "worker 1 ended" in line]) == 1, died.said
    assert "layer:2: channels of 0 + 3, 6 + 8 on all workers" in died.said
    shutil.copytree(folder, tmp_path / "alone")
    alone, one = tmp_path / "alone", tmp_path / "one"
    one.mkdir()
    (one / "train.py").write_text(SCRIPT)
    expected = run_script(one / "train.py", one, workers=1, engine="inline")
    resumed = run_script(
        alone / "train.py", alone, workers=1, engine="inline", resume=str(alone / "run")
    )
    went_on = by_two_ranks(folder, PACELINE_RESUME=str(folder / "run"))
    assert went_on.code == 0, went_on.said
    for run in (went_on.run, resumed):
        for name, tensor in expected.state.items():
            assert torch.allclose(run.state[name], tensor, rtol=EXACT, atol=EXACT), name
