"""An update of K batches for a loop that steps on each: as accumulated by hand, bit for bit."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.optim import SGD, Adam, lr_scheduler
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

from paceline.context import Context
from paceline.errors import ConfigError
from paceline.events import Lease
from paceline.exchange.solo import SoloExchange
from paceline.script.accumulation import Accumulation, samples_in
from paceline.script.worker import Pace
from runs import run_script


def alone(accumulate: int = 1) -> Pace:
    return Pace(SoloExchange(), Context(accumulate=None if accumulate == 1 else accumulate))


def samples(num_samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(num_samples, 3, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


def net() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def train(num_samples: int, every: int, rule: Any, *, before: bool = True) -> tuple[Tensor, int]:
    """By the flag: the loop of the README, with ``zero_grad`` before the step or behind it."""
    pace, model = alone(every), net()
    optimizer = rule(model.parameters(), lr=0.1)
    loader = DataLoader(samples(num_samples), batch_size=4)
    model, optimizer, loader = pace.prepare(model, optimizer, loader)
    for _ in pace.epochs(3):
        for inputs, targets in loader:
            with pace.step():
                if before:
                    optimizer.zero_grad()
                nn.functional.mse_loss(model(inputs), targets).backward()
                optimizer.step()
                if not before:
                    optimizer.zero_grad()
    return weights(model), pace.version


def by_hand(num_samples: int, every: int, rule: Any) -> tuple[Tensor, int]:
    """Gradients of sums over samples, in units of a batch of 4, divided when a step is due."""
    model, num_updates = net(), 0
    optimizer = rule(model.parameters(), lr=0.1)
    loader = DataLoader(samples(num_samples), batch_size=4)
    for _ in range(3):
        total = 0.0
        for number, (inputs, targets) in enumerate(loader, 1):
            share = len(inputs) / 4
            (nn.functional.mse_loss(model(inputs), targets) * share).backward()
            total += share
            if number % every == 0 or number == len(loader):
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.grad /= total
                optimizer.step()
                optimizer.zero_grad()
                total, num_updates = 0.0, num_updates + 1
    return weights(model), num_updates


@pytest.mark.parametrize("rule", [SGD, Adam])
@pytest.mark.parametrize("every", [2, 3, 5, 9])
@pytest.mark.parametrize("before", [True, False])
def test_one_worker_matches_accumulation_by_hand_bit_for_bit(
    rule: Any, every: int, before: bool
) -> None:
    result, version = train(20, every, rule, before=before)
    expected, num_updates = by_hand(20, every, rule)
    assert torch.equal(result, expected)
    assert version == num_updates


def test_a_short_batch_is_weighted_by_its_samples() -> None:
    result, _ = train(22, 6, SGD)  # all of an epoch: one update
    torch.testing.assert_close(result, by_hand(22, 6, SGD)[0], rtol=0, atol=1e-14)
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    inputs, targets = samples(22).tensors
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    torch.testing.assert_close(result, weights(model), rtol=0, atol=1e-14)


@pytest.mark.parametrize("num_samples", [4, 12, 27, 40])
def test_every_batch_of_an_epoch_of_any_length_is_used(num_samples: int) -> None:
    pace, model, data = alone(3), net(), Subset(samples(40), range(20))
    optimizer = SGD(model.parameters(), lr=0.0)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(data, batch_size=4))
    steps: list[list[int]] = []
    for _ in pace.epochs(2):
        steps.append([])
        for number, (inputs, _targets) in enumerate(loader, 1):
            optimizer.zero_grad()
            model(inputs).sum().backward()
            before = pace.version
            optimizer.step()
            if pace.version > before:
                steps[-1].append(number)
        data.indices = range(num_samples)
    num = -(-num_samples // 4)
    assert steps == [[3, 5], sorted({*range(3, num + 1, 3), num})]


def by_time(some: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """A batch whose first dimension is time, of a different length each time."""
    inputs, targets = (
        torch.stack([sample for sample, _ in some]),
        torch.stack([sample for _, sample in some]),
    )
    length = 2 + int(inputs[0, 0] > 0)
    return inputs.repeat(length, 1, 1), targets


def test_a_batch_is_weighted_by_its_samples_in_any_dimension() -> None:
    pace, model = alone(3), net()
    optimizer = SGD(model.parameters(), lr=0.1)
    mine = DataLoader(samples(22), batch_size=4, collate_fn=by_time)
    model, optimizer, loader = pace.prepare(model, optimizer, mine)
    for _ in pace.epochs(3):
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs[0]), targets).backward()
            optimizer.step()
    expected, num_updates = by_hand(22, 3, SGD)
    torch.testing.assert_close(weights(model), expected, rtol=0, atol=1e-14)
    assert pace.version == num_updates


class Endless(IterableDataset[Tensor]):
    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __iter__(self) -> Any:
        yield from samples(self.num_samples)


def test_a_stream_ends_with_an_update_of_the_remaining_batches() -> None:
    pace, model = alone(3), net()
    optimizer = SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Endless(20), batch_size=4)
    model, optimizer, loader = pace.prepare(model, optimizer, loader)
    for _ in pace.epochs(3):
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
    expected, num_updates = by_hand(20, 3, SGD)
    assert torch.equal(weights(model), expected)
    assert pace.version == num_updates


@pytest.mark.parametrize("with_loader", [True, False])
def test_pace_updates_counts_updates_and_not_batches(with_loader: bool) -> None:
    pace, model = alone(2), net()
    optimizer = SGD(model.parameters(), lr=0.1)
    data = samples(20)
    given = [DataLoader(data, batch_size=4)] if with_loader else []
    model, optimizer, *prepared = pace.prepare(model, optimizer, *given)
    num_drawn = 0
    for _ in pace.updates(7, *prepared):
        num_drawn += 1
        optimizer.zero_grad()
        model(data.tensors[0]).mean().backward()
        optimizer.step()
    assert pace.version == 7
    assert num_drawn == (5 + 5 + 2 if with_loader else 14)  # 3 updates a pass of 5 batches


def test_schedules_and_clipped_norms_advance_once_an_update() -> None:
    pace, model = alone(4), net()
    optimizer = SGD(model.parameters(), lr=1.0)
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    data = DataLoader(samples(32), batch_size=4)
    model, optimizer, loader, scheduler = pace.prepare(model, optimizer, data, scheduler)
    norms = []
    for _ in pace.epochs(1):
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            norms.append(float(pace.clip_grad_norm_(model.parameters(), 0.1)))
            optimizer.step()
            scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert [norm == norm for norm in norms] == [False, False, False, True] * 2


def test_gradients_set_aside_are_dropped_when_the_loop_is_left() -> None:
    pace, model = alone(3), net()
    optimizer = SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(samples(20), batch_size=4))
    before = weights(model)
    for _ in pace.epochs(2):
        for number, (inputs, targets) in enumerate(loader):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            if number == 1:
                break
    assert pace.version == 0
    assert torch.equal(weights(model), before)


# -- scalers ---------------------------------------------------------------------------------------


def overflowing(loss: Tensor, epoch: int, number: int) -> Tensor:
    """In one of the batches, which is its update's first and not its last."""
    return loss * float("inf") if (epoch, number) == (1, 1) else loss


def scaled(every: int) -> tuple[Tensor, float]:
    pace, model = alone(every), net().float()
    optimizer = SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
    data = TensorDataset(*(tensor.float() for tensor in samples(32).tensors))
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(data, batch_size=4))
    for epoch in pace.epochs(3):
        for number, (inputs, targets) in enumerate(loader, 1):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            scaler.scale(overflowing(loss, epoch, number)).backward()
            scaler.step(optimizer)
            scaler.update()
    return weights(model), scaler.get_scale()


def scaled_by_hand(every: int) -> tuple[Tensor, float]:
    model = net().float()
    optimizer = SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
    data = TensorDataset(*(tensor.float() for tensor in samples(32).tensors))
    for epoch in range(3):
        for number, (inputs, targets) in enumerate(DataLoader(data, batch_size=4), 1):
            loss = nn.functional.mse_loss(model(inputs), targets) / every
            scaler.scale(overflowing(loss, epoch, number)).backward()
            if number % every == 0:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    return weights(model), scaler.get_scale()


@pytest.mark.parametrize("every", [2, 4])
def test_one_overflow_skips_the_whole_update_and_is_counted_once(every: int) -> None:
    (result, scale), (expected, its) = scaled(every), scaled_by_hand(every)
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-6)
    assert scale == its  # halved once, then doubled after four that did not overflow


def clipped_twice(*, by_hand: bool) -> tuple[Tensor, float]:
    """Clip each parameter by its own norm; the first of two batches overflows once."""
    pace, model = alone(1 if by_hand else 2), net()
    optimizer = SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(samples(32), batch_size=4))
    for epoch in pace.epochs(3):
        for number, (inputs, targets) in enumerate(loader, 1):
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss = overflowing(loss, epoch, number) / (2 if by_hand else 1)
            scaler.scale(loss).backward()
            if by_hand and number % 2:
                continue
            scaler.unscale_(optimizer)
            for parameter in model.parameters():
                pace.clip_grad_norm_(parameter, 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return weights(model), scaler.get_scale()


def test_an_overflow_is_kept_when_parameters_are_clipped_separately() -> None:
    (result, scale), (expected, its) = clipped_twice(by_hand=False), clipped_twice(by_hand=True)
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-12)
    assert scale == its


# -- what is refused -------------------------------------------------------------------------------


def loop(body: Callable[..., None], *schedulers: Any) -> None:
    pace, model = alone(2), net()
    optimizer = SGD(model.parameters(), lr=0.1)
    data = DataLoader(samples(16), batch_size=4)
    model, optimizer, loader = pace.prepare(model, optimizer, data)
    made = [scheduler(optimizer) for scheduler in schedulers]
    for _ in pace.epochs(2):
        for number, (inputs, targets) in enumerate(loader, 1):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            body(number, pace, model, optimizer, *made)


def by_hand_too(number: int, pace: Pace, model: nn.Module, optimizer: Any) -> None:
    if number % 2 == 0:
        optimizer.step()


def last_left_out(number: int, pace: Pace, model: nn.Module, optimizer: Any) -> None:
    if number % 2 == 0:
        optimizer.zero_grad()
        return
    optimizer.step()


def clipped_each(number: int, pace: Pace, model: nn.Module, optimizer: Any) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def skipped(number: int, pace: Pace, model: nn.Module, optimizer: Any) -> None:
    with pace.step() as step:
        step.skip()


def weighed_late(number: int, pace: Pace, model: nn.Module, optimizer: Any) -> None:
    with pace.step() as step:
        optimizer.step()
        step.weight = float(number)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (by_hand_too, r"had a backward\(\) and no optimizer.step\(\)"),
        (last_left_out, r"no optimizer.step\(\)"),
        (clipped_each, "each batch's gradient, not their mean: to clip the mean write pace.clip"),
        (skipped, r"step.skip\(\) gives back a whole mini-batch, and with accumulate 2"),
        (weighed_late, r"step.weight was set after optimizer.step\(\)"),
    ],
)
def test_an_unsupported_loop_is_refused(body: Callable[..., None], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        loop(body)


BY_HAND = """
import sys, paceline, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pace = paceline.connect()
model = nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.ones(int(sys.argv[1]), 1)), batch_size=4)
model, optimizer, loader = pace.prepare(model, optimizer, loader)
for _ in pace.epochs(2):
    for number, (inputs,) in enumerate(loader, 1):
        with pace.step():
            (model(inputs).mean() / 2).backward()
            if number % 2 == 0 or sys.argv[2] == "steps" and number == len(loader):
                optimizer.step()
                optimizer.zero_grad()
"""


@pytest.mark.parametrize(("num", "rest"), [("15", "steps"), ("14", "steps"), ("17", "stays")])
def test_accumulated_gradients_of_an_epochs_rest(tmp_path: Path, num: str, rest: str) -> None:
    """Where no worker steps on them they stay, as with one worker."""
    script = tmp_path / "train.py"
    script.write_text(BY_HAND)
    run = run_script(script, tmp_path, num, rest, workers=2, engine="inline")
    assert run.summary.updates > 2


@pytest.mark.parametrize("num", ["17", "9"])
def test_a_step_on_a_last_batch_that_not_all_have_is_refused(tmp_path: Path, num: str) -> None:
    """One sample: the other worker has none, and its accumulated gradients would wait."""
    script = tmp_path / "train.py"
    script.write_text(BY_HAND.replace("number % 2", "number % 3"))
    with pytest.raises(ConfigError, match="which had too few samples for all 2 workers"):
        run_script(script, tmp_path, num, "steps", workers=2, engine="inline")


def test_a_scheduler_stepped_on_every_batch_is_refused() -> None:
    def stepped(number: int, pace: Pace, model: nn.Module, optimizer: Any, scheduler: Any) -> None:
        optimizer.step()
        scheduler.step()

    with pytest.raises(ConfigError, match="ExponentialLR was stepped inside the loop"):
        loop(stepped, lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.5))


def test_the_flag_overrides_the_argument_and_values_below_one_are_refused() -> None:
    model = net()
    objects = model, SGD(model.parameters(), lr=0.1), DataLoader(samples(8), batch_size=4)
    with pytest.raises(ConfigError, match="accumulate must be a number >= 1, got 0"):
        alone().prepare(*objects, accumulate=0)
    plain = alone()
    plain.prepare(*objects)
    with pytest.raises(ConfigError, match="accumulate must be a number >= 1, got 0"):
        plain.prepare(DataLoader(samples(8), batch_size=4), accumulate=0)
    pace = alone(2)
    pace.prepare(*objects, accumulate=0)
    assert pace.context.accumulate == 2


@pytest.mark.parametrize("is_first", [True, False])
def test_optimizers_of_an_update_must_step_on_the_same_batches(*, is_first: bool) -> None:
    """Between workers, whose second batch is not the loader's second one."""
    models = net(), net()
    optimizers = [SGD(model.parameters(), lr=0.1) for model in models]
    made = Accumulation(2, optimizers, 4, is_shared=True)
    for model in models:
        model(torch.ones(4, 3, dtype=torch.float64)).sum().backward()
    made.begin(4, is_last=False)
    made.hold(0, optimizers[0])
    made.end()
    made.begin(4, is_last=True)
    if is_first:
        made.joined(0, optimizers[0])
    with pytest.raises(ConfigError, match=r"accumulate 2: one optimizer stepped on 1 of the batch"):
        made.joined(1, optimizers[1])


class Claims:
    """A batch sampler whose ``__len__`` says 5."""

    def __init__(self, gives: int) -> None:
        self.gives = gives

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[number] for number in range(self.gives)])

    def __len__(self) -> int:
        return 5


@pytest.mark.parametrize("gives", [3, 4, 5, 6])
def test_a_batch_sampler_with_a_wrong_length_loses_no_batch(gives: int) -> None:
    pace, model = alone(2), net()
    optimizer = SGD(model.parameters(), lr=0.1)
    plain = DataLoader(samples(8), batch_sampler=Claims(gives))  # type: ignore[arg-type]
    model, optimizer, loader = pace.prepare(model, optimizer, plain)

    def epoch() -> None:
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()

    if gives == 3:
        with pytest.raises(ConfigError, match=r"accumulate 2: .* 5 batches \(__len__\) and gave 3"):
            epoch()
    else:
        epoch()
        assert pace.version == {4: 2, 5: 3, 6: 4}[gives]


# -- leases ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_samples", range(1, 13))
def test_a_lease_is_split_into_parts_of_at_most_a_mini_batch(num_samples: int) -> None:
    made = Accumulation(4, [SGD(net().parameters(), lr=0.1)], 3)
    parts = made.cut(Lease(7, 1, 5, 5 + num_samples))
    assert [part.start for part in parts] == [5, *(part.stop for part in parts[:-1])]
    assert parts[-1].stop == 5 + num_samples
    assert all(1 <= part.num_samples <= 3 for part in parts)
    assert len(parts) <= 4


@pytest.mark.parametrize(
    ("batch", "num_samples"),
    [(torch.ones(3, 2), 3), ((torch.ones(4, 1), 5), 4), ({"a": [torch.ones(2)]}, 2), (7, 1),
     (torch.ones(()), 1), (["one", "two"], 2), ([["one"] * 5, torch.ones(5)], 5),
     (pack_sequence([torch.ones(6), torch.ones(2)]), 2),
     ((pack_sequence([torch.ones(6), torch.ones(2)]), torch.ones(2)), 2)],
)  # fmt: skip
def test_samples_are_counted_in_every_kind_of_batch(batch: Any, num_samples: int) -> None:
    assert samples_in(batch) == num_samples
