"""Loops that touch parameters and state after ``prepare``: ``python edits.py CASE FOLDER``.

Each also runs plainly, with a stand-in for ``pace`` (``loops.Plain``), and must give the same
result or be refused by name. Results go to FOLDER/CASE-N.pt.

Longer than a file should be: one loop after the other, each to be read by itself.
"""

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, RMSprop
from torch.optim.swa_utils import AveragedModel

from loops import Results, gather, loss_of, make_loader, one_epoch
from tiny import CLASSES, WIDTH

CLAMP = 0.15
Edit = Callable[[nn.Module], None]


def make_net(*, has_norm: bool = False) -> nn.Module:
    """Only layers of torch, so that pickles load without this file."""
    torch.manual_seed(3)
    norm = nn.BatchNorm1d(33) if has_norm else nn.Identity()
    return nn.Sequential(
        nn.Linear(WIDTH, 33),
        norm,
        nn.Tanh(),
        nn.Sequential(nn.Linear(33, 9), nn.Linear(9, CLASSES)),
    ).double()


def clamp_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-CLAMP, CLAMP)


def clamp_in_place(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-CLAMP, CLAMP)


def clamp_by_replacing(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clamp(-CLAMP, CLAMP)


def norm_rows(model: nn.Module) -> None:
    """A weight-norm projection by hand."""
    weight: Any = model[0].weight  # type: ignore[index]
    weight.data.div_(weight.data.norm(dim=1, keepdim=True))


def load_zeros(model: nn.Module) -> None:
    model.load_state_dict({name: torch.zeros_like(x) for name, x in model.state_dict().items()})


def edit_one_row(model: nn.Module) -> None:
    model[0].weight.data[2].fill_(0.0)  # type: ignore[index, operator, union-attr]


def convert(model: nn.Module) -> None:
    model.float()


def shrink(model: nn.Module) -> None:
    layer: Any = model[0]
    layer.bias.data = layer.bias.data[:5]


def new_head(model: nn.Module) -> None:
    model[3][1] = nn.Linear(9, CLASSES).double()  # type: ignore[index, operator]


def edited(pace: Any, after_step: Edit | None = None, after_epoch: Edit | None = None) -> Results:
    model: Any = make_net()
    optimizer = SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, make_loader())
    for _ in pace.epochs(2):
        for inputs, targets in loader:
            with pace.step():
                optimizer.zero_grad()
                loss_of(model(inputs.to(model[0].weight.dtype)), targets).backward()
                optimizer.step()
                if after_step:
                    after_step(model)
        if after_epoch:
            after_epoch(model)
    return gather(model, optimizer)


class Clamped(RMSprop):
    """The projection is a part of the step."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.clamp_(-CLAMP, CLAMP)


def clamped_by_the_optimizer(pace: Any) -> Results:
    model = make_net()
    clamp_data(model)
    optimizer = Clamped(model.parameters(), lr=0.05)
    model, optimizer, loader = pace.prepare(model, optimizer, make_loader())
    most = []

    def note() -> None:
        most.append(max(float(one.detach().abs().max()) for one in model.parameters()))

    note()  # a worker may make no step under k-sync:1
    for _ in pace.epochs(2):
        one_epoch(pace, model, optimizer, loader, note)
    return {**gather(model, optimizer), "most": torch.tensor(max(most))}


def swapping(pace: Any, is_by_data: bool = False, is_inside: bool = False) -> Results:
    """Averaged weights are swapped in for an evaluation and out again."""
    model = make_net(has_norm=True)
    optimizer = SGD(model.parameters(), lr=0.3, momentum=0.9)
    average = AveragedModel(model)
    model, optimizer, loader = pace.prepare(model, optimizer, make_loader())
    losses = []

    def evaluate() -> None:
        average.update_parameters(model)
        kept = [one.detach().clone() for one in model.parameters()]
        with torch.no_grad():
            for mine, other in zip(model.parameters(), average.module.parameters(), strict=True):
                if is_by_data:
                    mine.data = other.data
                else:
                    mine.data.copy_(other.data)
            model.eval()
            inputs, targets = next(iter(make_loader(batch_size=60)))
            losses.append(float(loss_of(model(inputs), targets)))
            model.train()
            for mine, other in zip(model.parameters(), kept, strict=True):
                if is_by_data:
                    mine.data = other
                else:
                    mine.data.copy_(other)

    for _ in pace.epochs(3):
        one_epoch(pace, model, optimizer, loader, evaluate if is_inside else lambda: None)
        evaluate()
    results = gather(model, optimizer)
    load_zeros(model)  # after the last epoch every worker may differ
    assert all(not bool(one.any()) for one in model.parameters())
    return {**results, "losses": torch.tensor(losses)}


def loading_before_the_first_epoch(pace: Any, *, is_main_only: bool = False) -> Results:
    """As with other libraries: weights and optimizer are loaded after ``prepare``."""
    other = make_net()
    trained = Adam(other.parameters(), lr=0.05)
    for _ in range(2):
        inputs, targets = next(iter(make_loader()))
        loss_of(other(inputs), targets).backward()
        trained.step()
        trained.zero_grad()
    torch.manual_seed(5)
    model = make_net()
    optimizer = Adam(model.parameters(), lr=0.05)
    model, optimizer, loader = pace.prepare(model, optimizer, make_loader())
    if pace.is_main or not is_main_only:
        model.load_state_dict(other.state_dict())
        optimizer.load_state_dict(copy.deepcopy(trained.state_dict()))
    first = {f"first {name}": one.clone() for name, one in model.state_dict().items()}
    for _ in pace.epochs(2):
        one_epoch(pace, model, optimizer, loader)
    if is_main_only:
        first = {}
    return {**gather(model, optimizer), **first}


def loading_another_optimizer(pace: Any) -> Results:
    """The saved state has momentum, but the store was laid out without it."""
    model = make_net()
    other = SGD(model.parameters(), lr=0.3, momentum=0.9)
    loss_of(model(torch.ones(4, WIDTH).double()), torch.zeros(4).long()).backward()
    other.step()
    other.zero_grad()
    optimizer = SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, make_loader())
    optimizer.load_state_dict(other.state_dict())
    for _ in pace.epochs(2):
        one_epoch(pace, model, optimizer, loader)
    return gather(model, optimizer)


def unfreezing(pace: Any) -> Results:
    """A layer is unfrozen after an epoch and frozen again after the next."""
    model: Any = make_net()
    model[0].requires_grad_(False)
    optimizer = Adam(model.parameters(), lr=0.05)
    model, optimizer, loader = pace.prepare(model, optimizer, make_loader())
    for epoch in pace.epochs(3):
        model[0].requires_grad_(epoch == 1)
        one_epoch(pace, model, optimizer, loader)
    return gather(model, optimizer)


def unfreezing_with_momentum(pace: Any) -> Results:
    """Unfrozen layers have no momentum yet, the others have."""
    model: Any = make_net()
    model[0].requires_grad_(False)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, loader = pace.prepare(model, optimizer, make_loader())
    for epoch in pace.epochs(3):
        model[0].requires_grad_(epoch == 1)
        one_epoch(pace, model, optimizer, loader)
    return gather(model, optimizer)


def unfreezing_what_is_not_optimized(pace: Any) -> Results:
    model: Any = make_net()
    model[0].requires_grad_(False)
    optimizer = SGD([one for one in model.parameters() if one.requires_grad], lr=0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, make_loader())
    for epoch in pace.epochs(2):
        model[0].requires_grad_(epoch == 1)
        one_epoch(pace, model, optimizer, loader)
    return gather(model, optimizer)


class Counting(nn.Module):
    """Buffers that each pass replaces instead of changing them in place."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()
        self.register_buffer("mean", torch.zeros(WIDTH).double())
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * inputs.mean(0)
            self.passes = self.passes + 1
        outputs: Tensor = self.net(inputs - self.mean)
        return outputs


class Moving(Counting):
    """The same, by replacing the memory of the buffers."""

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.mean.data = 0.9 * self.mean + 0.1 * inputs.mean(0)
            self.passes.data = self.passes + 1
        outputs: Tensor = self.net(inputs - self.mean)
        return outputs


def making_buffers_anew(pace: Any, kind: type[Counting] = Counting) -> Results:
    torch.manual_seed(3)
    model: nn.Module = kind()
    optimizer = SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, make_loader())
    for _ in pace.epochs(2):
        one_epoch(pace, model, optimizer, loader)
    state = model.state_dict()
    return {"passes": state["passes"], "mean": state["mean"]}


def resetting_statistics(pace: Any) -> Results:
    """Batch norm statistics are reset between epochs by all workers."""
    model: Any = make_net(has_norm=True)
    optimizer = SGD(model.parameters(), lr=0.0)
    model, optimizer, loader = pace.prepare(model, optimizer, make_loader())
    for epoch in pace.epochs(2):
        if epoch == 1:
            model[1].reset_running_stats()
        one_epoch(pace, model, optimizer, loader)
    return {"passes": model[1].num_batches_tracked.clone()}


def adding_a_group(pace: Any) -> Results:
    model: Any = make_net()
    optimizer = SGD(model[3].parameters(), lr=0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, make_loader())
    for epoch in pace.epochs(2):
        if epoch == 1:
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.1})
        one_epoch(pace, model, optimizer, loader)
    return gather(model, optimizer)


def reading_state(pace: Any) -> Results:
    model: Any = make_net()
    optimizer = Adam(model.parameters(), lr=0.05)
    model, optimizer, loader = pace.prepare(model, optimizer, make_loader())
    for _ in pace.epochs(1):
        one_epoch(pace, model, optimizer, loader)
    return {"mean": optimizer.state[model[0].weight]["exp_avg"]}


def forgetting_state(pace: Any) -> Results:
    """The moments restart in each epoch."""
    model: Any = make_net()
    optimizer = Adam(model.parameters(), lr=0.05)
    model, optimizer, loader = pace.prepare(model, optimizer, make_loader())
    for _ in pace.epochs(2):
        one_epoch(pace, model, optimizer, loader)
        optimizer.state = type(optimizer.state)(dict)
    return gather(model, optimizer)


def with_another_optimizer(pace: Any, *, is_inside: bool, is_plain: bool = False) -> Results:
    """Something else is trained beside the model; ``is_plain``: tensors outside a module."""
    model: Any = make_net()
    optimizer = SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = pace.prepare(model, optimizer, make_loader())
    net = nn.Linear(2, 1)
    image = torch.zeros(2, requires_grad=True)
    other = torch.optim.LBFGS([image]) if is_plain else SGD(net.parameters(), lr=0.1)

    def train() -> None:
        def closure() -> Any:
            other.zero_grad()
            loss = (image - 1).square().sum() + net(torch.ones(2)).sum()
            loss.backward()
            return loss

        other.step(closure)

    for _ in pace.epochs(2):
        one_epoch(pace, model, optimizer, loader, train if is_inside else lambda: None)
        train()
    return {**gather(model, optimizer), "image": image.detach()}


def copying(pace: Any) -> Results:
    """Copies and pickles of the prepared objects equal those of plain PyTorch."""
    model: Any = make_net(has_norm=True)
    optimizer = Adam(model.parameters(), lr=0.05)
    before = copy.deepcopy(model)
    model, optimizer, loader = pace.prepare(model, optimizer, make_loader())
    for _ in pace.epochs(2):
        for inputs, targets in loader:
            with pace.step():
                optimizer.zero_grad()
                loss_of(model(inputs), targets).backward()
                check_copies(model, optimizer)
                check_copies(model[3], None)
                after = copy.deepcopy(model)
                held = [one.grad.clone() for one in model.parameters()]
                loss_of(after(inputs), targets).backward()
                loss_of(before(inputs), targets).backward()
                grads = [one.grad for one in model.parameters()]
                assert all(map(torch.equal, held, grads)), "a copy's backward is the model's"
                optimizer.step()
        check_copies(model, optimizer)
    return gather(model, optimizer)


def check_copies(model: Any, optimizer: Any) -> None:
    state = model.state_dict()
    size = sum(one.numel() * one.element_size() for one in state.values())
    for name, one in state.items():
        assert one.untyped_storage().nbytes() == one.numel() * one.element_size(), name
    data = saved(model)
    assert len(data) < size + 8000 + 1500 * len(state), f"{len(data)} bytes for {size}"
    assert b"paceline" not in data
    for again in (load(data), copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert all(map(torch.equal, again.state_dict().values(), state.values()))
        assert not any(one._forward_pre_hooks for one in again.modules())
        assert not any(one._state_dict_hooks for one in again.modules())
    for one in (*model.parameters(), *model.buffers()):
        assert len(saved(one.detach())) < one.numel() * one.element_size() + 3000
    with torch.no_grad():
        kept = next(model.parameters()).flatten()[0].clone()
        next(again.parameters()).zero_()
        assert next(model.parameters()).flatten()[0] == kept != 0, "a copy shares memory"
        next(iter(state.values())).data.zero_()  # otherwise it is refused: the model is meant
        assert next(model.parameters()).flatten()[0] == kept, "a state_dict shares memory"
    if optimizer is not None:
        data = saved(optimizer)
        assert b"paceline" not in data
        assert len(data) < 3 * size + 8000 + 3000 * len(state)
        for other in (load(data), copy.deepcopy(optimizer)):
            mine, its = optimizer.state_dict(), other.state_dict()
            assert mine["param_groups"] == its["param_groups"]
            # Others may have made an update since, even the first one.
            assert its["state"].keys() in (mine["state"].keys(), set())
            assert not {"step", "state_dict", "add_param_group"} & set(vars(other))


def saved(thing: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    return buffer.getvalue()


def load(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


def saving_for_others(pace: Any) -> Results:
    """A process without Paceline loads the file saved by one worker."""
    model = make_net()
    optimizer = Adam(model.parameters(), lr=0.05)
    model, optimizer, loader = pace.prepare(model, optimizer, make_loader())
    for _ in pace.epochs(1):
        one_epoch(pace, model, optimizer, loader)
    path = Path(sys.argv[2]) / f"whole-{pace.worker}.pt"
    torch.save({"model": model, "optimizer": optimizer}, path)
    text = (
        "import sys; sys.modules['paceline'] = None; import torch; "
        f"both = torch.load({str(path)!r}, weights_only=False); both['optimizer'].step(); "
        "print(sum(float(one.sum()) for one in both['model'].parameters()))"
    )
    if pace.is_main:
        done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
        total = sum(float(one.detach().sum()) for one in model.parameters())
        assert abs(float(done.stdout) - total) < 1e-9, (done, total)
    return gather(model, optimizer)


EDITS: dict[str, Edit] = {
    "clamp data": clamp_data,
    "clamp in place": clamp_in_place,
    "clamp by replacing": clamp_by_replacing,
    "norm rows": norm_rows,
    "load": load_zeros,
    "one row": edit_one_row,
    "convert": convert,
    "shrink": shrink,
    "new head": new_head,
}

CASES: dict[str, Callable[[Any], Results]] = {
    **{f"step {k}": lambda pace, e=e: edited(pace, after_step=e) for k, e in EDITS.items()},
    **{f"epoch {k}": lambda pace, e=e: edited(pace, after_epoch=e) for k, e in EDITS.items()},
    "clamped": clamped_by_the_optimizer,
    "swap": swapping,
    "swap data": lambda pace: swapping(pace, is_by_data=True),
    "swap inside": lambda pace: swapping(pace, is_inside=True),
    "swap data inside": lambda pace: swapping(pace, is_by_data=True, is_inside=True),
    "load first": loading_before_the_first_epoch,
    "load first main": lambda pace: loading_before_the_first_epoch(pace, is_main_only=True),
    "load momentum": loading_another_optimizer,
    "unfreeze": unfreezing,
    "unfreeze momentum": unfreezing_with_momentum,
    "unfreeze unused": unfreezing_what_is_not_optimized,
    "new buffers": making_buffers_anew,
    "moved buffers": lambda pace: making_buffers_anew(pace, Moving),
    "reset statistics": resetting_statistics,
    "add group": adding_a_group,
    "read state": reading_state,
    "forget state": forgetting_state,
    "second inside": lambda pace: with_another_optimizer(pace, is_inside=True),
    "second between": lambda pace: with_another_optimizer(pace, is_inside=False),
    "tensor inside": lambda pace: with_another_optimizer(pace, is_inside=True, is_plain=True),
    "tensor between": lambda pace: with_another_optimizer(pace, is_inside=False, is_plain=True),
    "copies": copying,
    "saved": saving_for_others,
}


if __name__ == "__main__":
    import paceline

    pace = paceline.connect()
    results = CASES[sys.argv[1]](pace)
    torch.save(results, Path(sys.argv[2]) / f"{sys.argv[1]}-{pace.worker}.pt")
