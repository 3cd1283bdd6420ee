"""Requests of a script for a split, and refusals before anything is cut."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline.context import Context
from paceline.errors import ConfigError
from paceline.partition.names import SplitName
from paceline.spread import asked as asked_of
from paceline.spread.asked import (
    _batch,
    known_loss,
    refuse_objects,
    refuse_uneven_state,
    split_of,
    usual_call,
)
from paceline.spread.group import Ranks
from paceline.system.pages import lean_heap
from paceline.tuning.candidate import LossForward
from threaded import in_threads

LOADER = DataLoader(TensorDataset(torch.zeros(4, 1)))
MODEL = nn.Linear(1, 1)
SGD = torch.optim.SGD(MODEL.parameters(), lr=0.1)


class Reaching:
    """An exchange whose members reach each other."""

    ranks = object()


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"protocol": "local-sgd:2"}, "another protocol than full-sync"),
        ({"compile": "default"}, "--compile"),
        ({"precision": "bf16"}, "--precision"),
        ({"compress": "fp16"}, "--compress"),
        ({"channels_last": True}, "--channels-last"),
        ({"fast": "auto"}, "--fast"),
    ],
)
def test_setting_unsupported_with_a_split_is_refused_by_name(
    setting: dict[str, object], words: str
) -> None:
    context = Context(workers=2, split="network", **setting)  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as refused:
        split_of(None, context, Reaching())
    assert str(refused.value).startswith(f"{words} is not supported with a split model")
    assert "leave it out" in str(refused.value)


def test_refused_setting_of_a_resumed_run_names_the_replacement() -> None:
    for setting, instead in (("compile", "--compile none"), ("compress", "--compress none")):
        context = Context(workers=2, resume="run", **{setting: "fp16"})  # type: ignore[arg-type]  # only what this looks at
        with pytest.raises(ConfigError, match=rf"\(network\): {instead} \(the resumed run may"):
            split_of("network", context, Reaching())


def test_optimizer_state_loaded_by_one_worker_is_refused_by_all() -> None:
    def work(ranks: Ranks) -> str:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        refuse_uneven_state(ranks, [optimizer])
        if ranks.everyone.rank == 0:
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        with pytest.raises(ConfigError) as refused:
            refuse_uneven_state(ranks, [optimizer])
        return str(refused.value)

    for message in in_threads(2, work):
        assert message.startswith("the optimizer of worker 1 begins with state")
        assert "optimizer.load_state_dict(...) in all workers" in message


def test_split_needs_workers_that_reach_each_other() -> None:
    context = Context(workers=2)
    assert split_of(None, context, None) is None
    assert str(split_of("network", context, Reaching())) == "network:2"
    with pytest.raises(
        ConfigError, match=r"needs ranks that .* --workers 2 --split network SCRIPT"
    ):
        split_of("network", context, None)
    with pytest.raises(ConfigError, match="--dry-run"):
        split_of("network", Context(workers=2, dry_run=True), Reaching())
    with pytest.raises(ConfigError, match="one run is divided in one way"):
        split_of("2x2", Context(workers=4, split="network"), Reaching())


def test_unsupported_objects_are_refused_by_name() -> None:
    cpu = torch.device("cpu")
    refuse_objects([MODEL], [SGD], LOADER, cpu, sticky=False)
    cases = [
        (([MODEL, MODEL], [SGD], LOADER, cpu), {}, "2 models"),
        (([MODEL], [SGD], None, cpu), {}, "a loop without a loader"),
        (([MODEL], [SGD], LOADER, torch.device("cuda")), {}, "device cuda"),
        (([MODEL], [torch.optim.LBFGS(MODEL.parameters())], LOADER, cpu), {}, "LBFGS"),
        (([MODEL], [SGD], LOADER, cpu), {"sticky": True}, "prepare(sticky=...)"),
    ]
    for objects, asked, words in cases:
        with pytest.raises(ConfigError, match="is not supported") as refused:
            refuse_objects(*objects, **asked)  # type: ignore[arg-type]
        assert words in str(refused.value)


@pytest.mark.parametrize(
    ("forward", "why"),
    [
        (None, "a script's loss comes after"),
        (LossForward(nn.functional.mse_loss), "its batches are not a pair of tensors"),
    ],
)
def test_schedule_that_needs_an_unknown_loss_is_refused(
    forward: LossForward | None, why: str
) -> None:
    name = SplitName(2, 1, schedule="1f1b")
    with pytest.raises(ConfigError) as refused:
        known_loss(name, MODEL, LOADER, forward)
    assert str(refused.value).startswith("split network:2:1f1b: 1f1b needs the loss of each")
    assert why in str(refused.value)
    assert str(refused.value).endswith("write network:2:gpipe")


def test_small_model_keeps_memory_freed_by_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = list[bool]()
    monkeypatch.setattr(asked_of, "keep", kept.append)
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    asked_of._keep_where_small(MODEL)  # not started by --split: the user's settings stay
    assert not kept
    for name, value in lean_heap({}).items():
        monkeypatch.setenv(name, value)
    asked_of._keep_where_small(nn.Linear(4097, 4096, device="meta"))
    assert not kept
    asked_of._keep_where_small(nn.Linear(4096, 4096, bias=False, device="meta"))
    assert kept == [True]


class Masked(nn.Module):
    """Two inputs."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x * mask


def test_model_is_called_with_the_inputs_of_its_batch() -> None:
    x, y = torch.ones(4, 1), torch.ones(4, 1)
    one, two = usual_call(MODEL), usual_call(model := Masked())
    model.forward = lambda *given, **named: (len(given), sorted(named))  # type: ignore[method-assign]
    assert torch.equal(one(MODEL, (x, y)), MODEL(x))
    assert torch.equal(one(MODEL, x), MODEL(x))
    assert two(model, [x, x, y]) == (2, [])
    assert two(model, ((x, x), y)) == (2, [])
    assert two(model, {"x": x, "mask": x, "labels": y}) == (0, ["mask", "x"])
    with pytest.raises(ConfigError, match=r"Masked takes \(x: .*say how the script calls it"):
        two(model, (x, y))
    loader = DataLoader(TensorDataset(torch.zeros(4, 3), torch.zeros(4, 1)))
    with pytest.raises(ConfigError, match="Linear does not run on the loader's first batch"):
        asked_of._look(MODEL, loader, one, 2)


def test_loss_is_tested_on_samples_from_the_whole_data_set() -> None:
    loader = DataLoader(TensorDataset(torch.arange(100)), batch_size=4)
    assert _batch(loader, 4)[0].tolist() == [0, 1, 2, 3]
    spread = _batch(loader, 20, is_spread=True)[0]
    assert spread.tolist() == _batch(loader, 20, is_spread=True)[0].tolist()
    assert len(set(spread.tolist())) == 20
    assert len(set((spread % 5).tolist())) == 5  # not at equal distances
    assert float(spread.float().std()) > 15.0
    assert _batch(loader, 200, is_spread=True)[0].tolist() == [*range(100), *range(100)]
