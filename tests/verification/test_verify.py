"""Models equal under N workers are verified; three planted errors are named."""

import gc
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from textwrap import dedent

import cloudpickle
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from paceline.data.arrays import Splits
from paceline.errors import ConfigError
from paceline.replica.replica import Replica
from paceline.verification import cases, in_worker, layers, of_script, of_task, plain
from paceline.verification.verdict import ALLOWED, VerifyRow, render_verified
from paceline.verification.verify import verify
from paceline.workloads import load_task
from paceline.workloads.base import Task
from tiny import CLASSES, COMPILED, PLAIN_SGD, TASK, WIDTH, WITH_BATCH_NORM, samples

Say = Callable[[str], tuple[int, str, str]]

# -- equal -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["softmax", "lenet", "transformer", "quadratic", "mlp488k"])
def test_built_in_tasks_compute_the_same_with_several_workers(name: str) -> None:
    result = verify(name, (3,))
    assert result.is_equal, "\n".join(render_verified(result))
    assert [(row.case.dtype, row.case.is_even) for row in result.rows] == [
        ("float64", True), ("float64", False), ("float32", True), ("float32", False),
    ]  # fmt: skip
    assert all(row.found.difference <= ALLOWED[row.case.dtype] for row in result.rows)


def replicas() -> list[Replica]:
    return [one for one in gc.get_objects() if type(one) is Replica]


def test_verify_leaves_no_model_in_this_process() -> None:
    """Neither the model of a worker nor the whole data set, of which it takes a few samples."""
    before = {id(one) for one in replicas()}  # held by other tests of this process
    verify("softmax", (2,))
    gc.collect()
    assert not [one for one in replicas() if id(one) not in before]
    subject = of_task.TaskSubject(load_task("softmax"))
    small = subject._small(cases.VerifyCase(workers=2, dtype="float32", is_even=True))
    assert len(cloudpickle.dumps(small)) < 1_000_000


def test_equal_infinities_match_and_nan_never_does() -> None:
    mask = torch.tensor([0.0, -math.inf, math.nan])
    assert plain.differ({"mask": mask[:2]}, {"mask": mask[:2].clone()}) == 0.0
    assert plain.differ({"mask": mask[:2]}, {"mask": torch.zeros(2)}) == math.inf
    assert plain.differ({"mask": mask}, {"mask": mask.clone()}) == math.inf


def test_each_number_of_workers_has_even_and_uneven_batches() -> None:
    result = verify(TASK, (1, 2, 4))
    assert result.is_equal
    rows = [row for row in result.rows if row.case.dtype == "float64"]
    assert [row.found.sizes for row in rows] == [
        (4, 4, 2), (8, 8, 4), (9, 9, 5), (16, 16, 8), (17, 17, 9),
    ]  # fmt: skip
    for row in rows[1:]:
        assert (row.found.sizes[0] % row.case.workers == 0) == row.case.is_even


def test_compiled_task_is_compared_to_its_saved_model() -> None:
    result = verify(COMPILED, (2,))
    assert result.is_equal, "\n".join(render_verified(result))


def test_samples_that_are_no_pairs_are_refused() -> None:
    x = torch.zeros(60, WIDTH, dtype=torch.float64)
    triples = Splits(train=TensorDataset(x, x, torch.zeros(60)), source="made up")
    with pytest.raises(ConfigError, match=r"must be a pair .*, got 3 parts"):
        verify(replace(PLAIN_SGD, data=lambda: triples), (2,))


def test_changed_learning_rate_exceeds_the_allowed_difference() -> None:
    """Another rate in one of the two gives a difference far above the allowed one."""
    task = replace(PLAIN_SGD, data=lambda: samples(12), epochs=1)
    gap = plain.differ(plain.plain_loop(task), plain.plain_loop(task, lr=0.29))
    assert gap > 100 * ALLOWED["float32"]


@pytest.mark.parametrize("other", [math.nan, math.inf])
def test_nonfinite_tensor_in_one_model_differs_anywhere(
    other: float,
) -> None:
    one = {"first": torch.zeros(2), "second": torch.zeros(2), "third": torch.zeros(2)}
    for name in one:
        differing = one | {name: torch.tensor([0.0, other])}
        assert plain.largest_difference(one, differing) == (name, math.inf)


def test_infinities_in_both_models_are_no_difference() -> None:
    """As in the mask of a causal model: ``-inf - -inf`` is nan."""
    one = {"mask": torch.full((3, 3), -math.inf).triu(1), "seen": torch.tensor([3])}
    other = {name: value.clone() for name, value in one.items()}
    assert plain.largest_difference(one, other) == ("", 0.0)
    other["mask"][2, 0] = 0.5
    assert plain.largest_difference(one, other) == ("mask", 0.5)
    other["mask"][0, 1] = math.inf
    assert plain.largest_difference(one, other) == ("mask", math.inf)


def test_nan_is_not_attributed_to_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it would equal the rounding and be allowed."""
    first = cases.FirstUpdate(losses=(1.0,), samples=(2,), weights=(1.0,))
    left = {"state": {"spread": torch.tensor([math.nan])}, "own": False}
    monkeypatch.setattr(of_script.ScriptSubject, "_run", lambda *given: (left, first, (2,)))
    subject = object.__new__(of_script.ScriptSubject)
    case = cases.VerifyCase(workers=2, dtype="float32", is_even=True)
    result = subject.compare(case)
    assert (result.difference, result.rounding) == (math.inf, 0.0)
    assert not VerifyRow(case=case, found=result).is_equal


# -- planted errors --------------------------------------------------------------------------------


def test_batch_norm_is_named_and_the_rest_is_verified_without_it() -> None:
    result = verify(WITH_BATCH_NORM, (2,))
    assert not result.is_equal
    [cause] = result.causes
    assert cause.what == "norm (BatchNorm1d)"
    assert "GroupNorm" in cause.fix
    assert result.aside is not None
    assert result.aside.is_equal
    assert result.aside.case.frozen == ("norm",)


class Dropping(nn.Module):
    """A layer that draws random numbers without a random layer of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(WIDTH, 8), nn.Linear(8, CLASSES)
        self.between = nn.ModuleDict({"drop": nn.Dropout(0.5)})

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.out(self.between["drop"](torch.tanh(self.first(inputs))))
        return outputs


def test_dropout_is_named_as_random() -> None:
    result = verify(replace(PLAIN_SGD, model=Dropping), (2,))
    [cause] = result.causes
    assert cause.what == "between.drop (Dropout)"
    assert "random" in cause.why
    assert result.aside is not None
    assert result.aside.is_equal


class Centred(nn.Module):
    """A custom layer that depends on its batch and is no norm of torch."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs - inputs.mean(dim=0)


def centred() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 8), Centred(), nn.Tanh(), nn.Linear(8, CLASSES))


def test_custom_layer_is_named() -> None:
    result = verify(replace(PLAIN_SGD, model=centred), (2,))
    assert result.causes[0].what == "1 (Centred)"
    assert result.aside is not None
    assert not result.aside.is_equal  # eval() does not change it


SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import paceline

pace = paceline.connect()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
inputs = torch.randn(96, 6, generator=torch.Generator().manual_seed(1))
loader = DataLoader(TensorDataset(inputs, inputs[:, :3].argmax(1)), batch_size=16, shuffle=True)
{prepare}
for epoch in pace.epochs(2):
    for x, y in loader:
        with pace.step() as step:
            optimizer.zero_grad()
            {loss}
            loss.backward()
            optimizer.step()
    open("evaluated.txt", "w").write("behind the updates")
open("written.txt", "w").write("behind the loop")
"""
PREPARE = "model, optimizer, loader = pace.prepare(model, optimizer, loader)"
MEAN = "loss = nn.functional.cross_entropy(model(x), y)"
SUM = 'loss = nn.functional.cross_entropy(model(x), y, reduction="sum")'


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Write the script with this loss."""
    monkeypatch.chdir(tmp_path)

    def write(loss: str, prepare: str = PREPARE) -> str:
        loss = dedent(loss).strip().replace("\n", "\n            ")
        (tmp_path / "train.py").write_text(SCRIPT.format(loss=loss, prepare=prepare))
        return "train.py"

    return write


def test_script_is_verified_and_ends_after_its_loop(
    written: Callable[..., str], tmp_path: Path
) -> None:
    result = verify(written(MEAN), (1, 2, 3))
    assert result.is_equal, "\n".join(render_verified(result))
    assert [row.found.sizes[0] for row in result.rows[:5]] == [8, 16, 15, 15, 14]
    assert not (tmp_path / "written.txt").exists()
    assert not (tmp_path / "evaluated.txt").exists()


OWN_BATCHES = """
class Growing:
    def __iter__(self):
        yield from (list(range(8 * n, 9 * n + 5)) for n in range(len(self)))

    def __len__(self):
        return 3

loader = DataLoader(loader.dataset, batch_sampler=Growing())
"""
PLAIN_BATCHES = """
from torch.utils.data import BatchSampler, RandomSampler
batches = BatchSampler(RandomSampler(loader.dataset), batch_size=16, drop_last=True)
loader = DataLoader(loader.dataset, batch_sampler=batches)
"""


def test_custom_batch_sampler_keeps_its_batches_in_one_row(
    written: Callable[..., str],
) -> None:
    result = verify(written(MEAN, OWN_BATCHES + PREPARE), (1, 2))
    assert result.is_equal, "\n".join(render_verified(result))
    assert [(row.case.dtype, row.case.workers) for row in result.rows] == [
        ("float64", 1), ("float64", 2), ("float32", 1), ("float32", 2),
    ]  # fmt: skip
    assert {row.found.sizes for row in result.rows} == {(5, 6, 7)}
    assert [row.to_json()["parts"] for row in result.rows] == ["5", "3 + 2"] * 2
    [note] = result.notes
    assert "the script's own batch sampler makes the batches" in note


def test_plain_batch_sampler_gets_the_batches_of_each_row(written: Callable[..., str]) -> None:
    result = verify(written(MEAN, PLAIN_BATCHES + PREPARE), (2,))
    assert result.is_equal, "\n".join(render_verified(result))
    assert [row.found.sizes for row in result.rows] == [(16,) * 3, (15,) * 3] * 2
    assert result.notes == ()


def test_fixed_step_weight_is_named_as_a_mean_of_means(written: Callable[..., str]) -> None:
    result = verify(written(f"step.weight = 1.0\n{MEAN}"), (2,))
    assert [row.is_equal for row in result.rows] == [True, False, True, False]
    [cause] = result.causes
    assert (cause.kind, cause.what) == ("mean of means", "step.weight")
    assert "0.500 and 0.500" in cause.why


def test_loss_divided_by_a_constant_is_named_as_a_mean_of_means(
    written: Callable[..., str],
) -> None:
    result = verify(written(f"{SUM} / (16 // pace.num_workers)"), (2,))
    assert [row.is_equal for row in result.rows] == [True, False, True, False]
    [cause] = result.causes
    assert (cause.kind, cause.what) == ("mean of means", "the loss")
    assert "len(inputs)" in cause.fix


def test_summed_loss_is_named(written: Callable[..., str]) -> None:
    result = verify(written(SUM), (2,))
    [cause] = result.causes
    assert (cause.kind, cause.what) == ("sum", "the loss")


def test_random_loop_is_not_blamed_on_its_loss(written: Callable[..., str]) -> None:
    result = verify(written(f"x = x + torch.randn_like(x)\n{MEAN}"), (2,))
    [cause] = result.causes
    assert (cause.kind, cause.what) == ("random", "the loop")


def test_unexplained_difference_names_the_parameter(written: Callable[..., str]) -> None:
    loss = f"{MEAN}\nmodel[0].bias.register_hook(lambda g: g * pace.num_workers) if step else 0"
    result = verify(written(loss), (2,))
    [cause] = result.causes
    assert (cause.kind, cause.what) == ("unknown", "0.bias")


# -- the command -----------------------------------------------------------------------------------


def test_verify_prints_a_table_and_exits_with_0_or_1(say: Say, written: Callable[..., str]) -> None:
    assert "equal: 1 worker computes what one does" in say("verify quadratic -n 1,1")[1]
    code, out, _ = say("verify quadratic -n 1,2")
    assert code == 0
    assert (
        "equal: 1, 2 workers compute what one does (float64 to 1e-12 and float32 to 1e-06)" in out
    )
    assert "5 + 4" in out
    code, out, _ = say(f"verify {written(SUM)} -n 2 --json")
    assert code == 1
    report = json.loads(out)
    assert report["is_equal"] is False
    assert report["causes"][0]["kind"] == "sum"
    page = (Path(__file__).parents[2] / "docs" / "json.md").read_text()
    section = page.split("## `paceline verify`")[1].split("\n## ")[0]
    for field in (*report, *report["rows"][0], *report["causes"][0]):
        assert f"`{field}`" in section, field


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("verify quadratic -n 0,2", "from 1 to"),
        ("verify quadratic -n two", "whole numbers"),
        ("verify nothing.py", "no script nothing.py"),
        ("verify softmaxx", "did you mean 'softmax'"),
        ("verify quadratic -- --epochs 3", "is a task"),
    ],
)
def test_invalid_input_gets_a_one_line_error(say: Say, line: str, words: str) -> None:
    code, _, err = say(line)
    assert code == 2
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            ("for epoch in pace.epochs(2)", "for epoch in ()"),
            "made no update, which proves nothing",
        ),
        (("lr=0.1", "lr=0.0"), "3 updates moved no parameter, which proves nothing"),
    ],
)
def test_script_that_trains_nothing_is_refused(
    written: Callable[..., str], change: tuple[str, str], words: str
) -> None:
    path = Path(written(MEAN))
    path.write_text(path.read_text().replace(*change))
    with pytest.raises(ConfigError, match=words):
        verify(str(path), (2,))


def test_script_without_a_loader_is_refused(written: Callable[..., str]) -> None:
    prepare = "model, optimizer = pace.prepare(model, optimizer)"
    with pytest.raises(ConfigError, match="given a loader"):
        verify(written(MEAN, prepare), (2,))


def test_augmented_samples_are_repeatable() -> None:
    data = in_worker.SeededSamples([0.0] * 4)
    assert data[1] == 0.0
    noisy = in_worker.SeededSamples(Noisy())
    assert torch.equal(noisy[1], noisy[1])
    assert not torch.equal(noisy[1], noisy[2])


class Noisy:
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(3)


def test_stream_is_refused() -> None:
    class Stream(torch.utils.data.IterableDataset[Tensor]):
        def __iter__(self) -> Iterator[Tensor]:
            return iter([])

    task: Task = replace(TASK, data=lambda: replace(samples(), train=Stream()))
    with pytest.raises(ConfigError, match="stream"):
        of_task.TaskSubject(task)


# -- the parts -------------------------------------------------------------------------------------


def test_even_and_uneven_cases_have_such_batch_sizes() -> None:
    for own in (None, 16, 64, 3):
        for workers in (2, 3, 5):
            even, uneven = (
                cases.VerifyCase(workers=workers, dtype="float64", is_even=one).batch_size(own)
                for one in (True, False)
            )
            assert even % workers == 0
            assert uneven % workers != 0
            assert min(even, uneven) >= workers


def test_layers_are_classified_by_cause_and_the_innermost_is_named() -> None:
    model = nn.Sequential(
        nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(0.5), Centred(),
        nn.Sequential(nn.Linear(8, 4), nn.LayerNorm(4)),
    )  # fmt: skip
    breaking = layers.breaking_layers(model, [torch.randn(13, WIDTH)], {}, 3)
    assert [(layer.name, layer.cause) for layer in breaking] == [
        ("3", "random"), ("1", "batch"), ("4", "batch"),
    ]  # fmt: skip
    assert not layers.breaking_layers(model.eval()[:4], [torch.randn(13, WIDTH)], {}, 3)


def test_layers_with_keyword_arguments_and_tuples_are_compared() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.LSTM(WIDTH, 5, batch_first=True)
            self.norm = nn.BatchNorm1d(5)

        def forward(self, *, inputs: Tensor) -> dict[str, Tensor]:
            _, (hidden, _) = self.cell(inputs)
            return {"outputs": self.norm(hidden[-1])}

    breaking = layers.breaking_layers(Recurrent(), [], {"inputs": torch.randn(9, 4, WIDTH)}, 2)
    assert [layer.name for layer in breaking] == ["norm"]


def test_request_to_a_worker_survives_serialization() -> None:
    case = cases.VerifyCase(workers=3, dtype="float32", is_even=False, frozen=("a.b",))
    request = of_script.Asked(case=case, folder="/somewhere", looks=True)
    assert of_script.Asked.read(request.write()) == request
