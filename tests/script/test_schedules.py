"""Learning-rate schedulers: each has its own rhythm, which is that of plain PyTorch."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch

import loops
import scheduled
from paceline.context import Context
from paceline.errors import ConfigError
from paceline.exchange.solo import SoloExchange
from paceline.script.worker import Pace
from runs import run_script

SCRIPT = Path(scheduled.__file__)
PEERS, STORE, INLINE = {"path": "peers"}, {"path": "store"}, {"engine": "inline"}
CLOSE = 1e-9


def _run(case: str, folder: Path, **settings: Any) -> list[dict[str, Any]]:
    """Each worker's result."""
    settings = {"workers": 2, "protocol": "full-sync", **settings}
    run_script(SCRIPT, folder, case, str(folder), **settings)
    paths = [folder / f"result-{seat}.pt" for seat in range(settings["workers"])]
    return [torch.load(path) for path in paths]


def _plain(case: str) -> dict[str, Any]:
    return scheduled.run(loops.Plain(), case)


def assert_close(one: Any, other: Any, close: float = CLOSE) -> None:
    """Of numbers, texts, tensors, and lists and dicts of them."""
    if isinstance(other, dict):
        assert one.keys() == other.keys()
        for key in other:
            assert_close(one[key], other[key], close)
    elif isinstance(other, list | tuple):
        assert len(one) == len(other)
        for mine, its in zip(one, other, strict=True):
            assert_close(mine, its, close)
    elif isinstance(other, torch.Tensor):
        assert float((one - other).abs().max()) <= close
    elif isinstance(other, float):
        assert one == pytest.approx(other, abs=close)
    else:
        assert one == other


@pytest.mark.parametrize("case", scheduled.CASES)
def test_a_lone_worker_matches_plain_pytorch_bit_for_bit(case: str) -> None:
    alone = scheduled.run(Pace(SoloExchange(), Context()), case)
    plain = _plain(case)
    alone.pop("version"), plain.pop("version")
    assert_close(alone, plain, 0.0)


@pytest.mark.parametrize("case", scheduled.CASES)
def test_full_sync_steps_each_scheduler_where_plain_pytorch_does(tmp_path: Path, case: str) -> None:
    plain = _plain(case)
    for result in _run(case, tmp_path, **INLINE):
        for key in ("parameters", "rates", "momenta", "states"):
            assert_close(result[key], plain[key])


@pytest.mark.parametrize("where", [PEERS, STORE], ids=str)
@pytest.mark.parametrize("case", ["each", "two rhythms", "every fourth, first", "plateau inside"])
def test_live_workers_step_each_scheduler_where_plain_pytorch_does(
    tmp_path: Path, case: str, where: dict[str, str]
) -> None:
    plain = _plain(case)
    for result in _run(case, tmp_path, **where):
        for key in ("parameters", "rates", "momenta", "states"):
            assert_close(result[key], plain[key])


@pytest.mark.parametrize("where", [PEERS, STORE], ids=str)
@pytest.mark.parametrize("case", ["each", "every fourth, first", "restarts, a fraction"])
def test_a_worker_without_a_mini_batch_in_the_last_update_agrees(
    tmp_path: Path, case: str, where: dict[str, str]
) -> None:
    """73 samples: the last update of an epoch has one, and index 0 and 8 of 10 are a fourth."""
    case = f"{case} / uneven"
    plain = _plain(case)
    first, second = _run(case, tmp_path, **where)
    assert len(first["rates"]) == len(plain["rates"]) == len(second["rates"]) + scheduled.EPOCHS
    for result in (first, second):
        assert_close(result["parameters"], plain["parameters"])
    assert_close(first["rates"], plain["rates"])
    assert_close(first["states"], plain["states"])


# -- members that go by their own ways -------------------------------------------------------------


@pytest.mark.parametrize(
    "protocol", ["k-sync:1", "async", "k-batch-async:2", "stale-synchronous:1"]
)
@pytest.mark.parametrize("case", ["each", "each, before", "one cycle / uneven", "two rhythms"])
def test_without_lockstep_a_rate_is_a_function_of_the_version(
    tmp_path: Path, case: str, protocol: str
) -> None:
    name = case.partition(" / ")[0]
    results = _run(case, tmp_path, engine="inline", protocol=protocol)
    number = results[0]["version"]
    assert {result["version"] for result in results} == {number}
    for result in results:
        assert_close(result["last"], _rates_after(name, number))
        assert_close(result["states"], results[0]["states"])
        if "two" not in name:
            known = [_rates_after(name, n)[0] for n in range(number + 1)]
            assert all(rate in known for rate in result["rates"])


def _rates_after(name: str, number: int) -> list[list[float]]:
    """Rates of plain PyTorch after ``number`` updates in as many epochs."""
    case = scheduled.CASES[name]
    _, optimizer, _ = scheduled.make(8)
    own = case["made"](optimizer)
    for _ in range(number):
        optimizer.step()
        case.get("after", case.get("before"))(own, 0, 0, 1)
    for _ in range(scheduled.EPOCHS if "after_epoch" in case else 0):
        case["after_epoch"](own, 0, 0, 1)
    return [[group["lr"] for group in optimizer.param_groups]]


@pytest.mark.parametrize("case", scheduled.OTHER)
def test_without_lockstep_another_rhythm_is_refused_by_name(tmp_path: Path, case: str) -> None:
    with pytest.raises(ConfigError, match=r"worker \d steps \w+ .* inside the loop; .*full-sync"):
        _run(case, tmp_path, engine="inline", protocol="k-sync:1")


ONE_OF_TWO_PREPARED = """
import paceline, torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR
from torch.utils.data import DataLoader, TensorDataset

pace = paceline.connect()
model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
cosine, warmup = CosineAnnealingLR(optimizer, 4), LinearLR(optimizer, 0.1, total_iters=9)
loader = DataLoader(TensorDataset(torch.rand(32, 2)), batch_size=8)
model, optimizer, loader, cosine = pace.prepare(model, optimizer, loader, cosine)
for _ in pace.epochs(2):
    for (inputs,) in loader:
        with pace.step():
            optimizer.zero_grad()
            model(inputs).pow(2).mean().backward()
            optimizer.step()
            warmup.step()
    cosine.step()
"""


def test_without_lockstep_one_left_out_of_two_is_refused_by_name(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(ONE_OF_TWO_PREPARED)
    with pytest.raises(ConfigError, match="LinearLR was stepped inside the loop, but it was not"):
        run_script(script, tmp_path, workers=2, engine="inline", protocol="k-sync:1")


@pytest.mark.parametrize("where", [PEERS, STORE, INLINE], ids=str)
@pytest.mark.parametrize("case", ["each", "every fourth, first", "restarts, a fraction"])
def test_local_steps_are_followed_one_by_one(
    tmp_path: Path, case: str, where: dict[str, str]
) -> None:
    """Twenty mini-batches an epoch, in rounds of 4 + 4, 4 + 4 and 2 + 2."""
    results = _run(case, tmp_path, protocol="local-sgd:4", **where)
    for num_steps, result in zip((10, 10), results, strict=True):
        assert_close(result["rates"], _rates_of_steps(case, num_steps, result["number"]))


def _rates_of_steps(case: str, num_steps: int, number: int) -> list[list[float]]:
    """Rates of a plain loop of ``num_steps`` steps an epoch."""
    _, optimizer, _ = scheduled.make(8)
    own, rates = scheduled.CASES[case]["made"](optimizer), []
    for epoch in range(scheduled.EPOCHS):
        for index in range(num_steps):
            optimizer.step()
            scheduled.CASES[case]["after"](own, epoch, index, number)
            rates.append([group["lr"] for group in optimizer.param_groups])
    return rates


# -- what is refused, and what is left as it is ----------------------------------------------------


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("nine", "takes at most 8 schedulers, got 9; .*ChainedScheduler"),
        ("loaded inside", r"CosineAnnealingLR.load_state_dict\(\) was called while"),
        ("a metric of one's own", r"a metric that steps the scheduler must be the same in all"),
    ],
)
@pytest.mark.parametrize("where", [PEERS, INLINE], ids=str)
def test_unsupported_schedulers_are_refused_by_name(
    tmp_path: Path, case: str, says: str, where: dict[str, str]
) -> None:
    with pytest.raises(ConfigError, match=says):
        _run(case, tmp_path, **where)


def test_a_lone_workers_scheduler_is_left_unchanged() -> None:
    model, optimizer, loader = scheduled.make(80)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    before = dict(vars(scheduler))
    Pace(SoloExchange(), Context()).prepare(model, optimizer, loader, scheduler)
    assert vars(scheduler) == before


@pytest.mark.parametrize("where", [{"workers": 1}, INLINE, PEERS, STORE], ids=str)
def test_a_scheduler_state_can_be_pickled_and_is_plain_pytorchs(
    tmp_path: Path, where: dict[str, Any]
) -> None:
    """The states are saved with ``torch.save`` by every case."""
    (state,) = _plain("sequential")["states"]
    for result in _run("sequential", tmp_path, **where):
        (mine,) = result["states"]
        assert mine.keys() == state.keys()
        torch.save(mine, io.BytesIO())
        _, optimizer, _ = scheduled.make(8)
        (fresh,) = scheduled.sequential(optimizer)
        fresh.load_state_dict(mine)
        assert_close(fresh.state_dict(), state)


# -- updates that are skipped ----------------------------------------------------------------------

SCALED = ["scaled, each", "scaled, looking, each", "scaled, twice", "scaled, restarts"]


@pytest.mark.parametrize("where", [INLINE, PEERS, STORE], ids=str)
@pytest.mark.parametrize("case", SCALED)
def test_a_script_with_its_own_scaler_counts_steps_as_written(
    tmp_path: Path, case: str, where: dict[str, str]
) -> None:
    plain = _plain(case)
    for result in _run(case, tmp_path, **where):
        assert_close(result, plain)


@pytest.mark.parametrize("case", SCALED)
def test_a_lone_worker_with_its_own_scaler_matches_bit_for_bit(case: str) -> None:
    alone = scheduled.run(Pace(SoloExchange(), Context()), case)
    assert_close(alone, _plain(case), 0.0)


@pytest.mark.parametrize(("made", "num_counted"), [("each", 9), ("every fourth, last", 2)])
def test_a_lone_worker_does_not_count_a_skipped_update(made: str, num_counted: int) -> None:
    """The gradient of the fourth batch is inf: a scheduler that steps on every fourth continues."""
    model, optimizer, loader = scheduled.make(80)
    own = scheduled.CASES[made]["made"](optimizer)
    pace = Pace(SoloExchange(), Context(nonfinite="skip"))
    model, optimizer, loader, *own = pace.prepare(model, optimizer, loader, *own)
    for epoch in pace.epochs(1):
        for index, (inputs, targets) in enumerate(loader):
            with pace.step():
                optimizer.zero_grad()
                loss = ((model(inputs) - targets) ** 2).mean()
                (loss * float("inf") if index == 3 else loss).backward()
                optimizer.step()
                scheduled.CASES[made]["after"](own, epoch, index, 10)
    assert own[0].last_epoch == num_counted
