"""A model's layers in the plan, and the modes that a called-off step restores."""

import torch
from torch import nn

from paceline.replica.layers import (
    Modes,
    WrittenBuffers,
    gradient_hooks_note,
    late_buffer_note,
    parameter_table,
)
from tiny import Tied


class Scaled(nn.Module):
    """A layer of the user's own, without parameters."""


def test_each_parameter_counts_once_and_frozen_ones_are_not_trainable() -> None:
    rows = {row.name: row for row in parameter_table(Tied())}
    assert list(rows) == ["first", "second", "out"]
    assert rows["first"] == ("first", "Linear", "6 x 6, 6", 42, 42, 42 * 8)
    assert rows["second"] == ("second", "Linear", "shared, 6", 6, 6, 6 * 8)
    assert (rows["out"].num_parameters, rows["out"].num_trainable) == (21, 18)
    model = Tied()
    assert sum(value.num_parameters for value in rows.values()) == sum(
        parameter.numel() for parameter in model.parameters()
    )


def test_custom_layers_without_parameters_are_listed() -> None:
    rows = parameter_table(nn.Sequential(Scaled(), nn.ReLU(), nn.Linear(2, 1, bias=False)))
    assert [(row.name, row.kind, row.shapes) for row in rows] == [
        ("0", "Scaled", ""),
        ("2", "Linear", "1 x 2"),
    ]


def test_active_hooks_on_gradients_are_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    assert gradient_hooks_note(model) == ()
    handle = model[1].weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
    [note] = gradient_hooks_note(model)
    assert note.startswith("hooks on the gradient of '1.weight' act on each worker's part")
    handle.remove()
    assert gradient_hooks_note(model) == ()
    for one in model.parameters():
        one.register_post_accumulate_grad_hook(lambda parameter: None)
    assert "'0.weight' and 3 more act" in gradient_hooks_note(model)[0]


def test_modes_are_restored() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2).eval())
    modes = Modes(model)
    modes.note()
    model.eval()
    torch.set_grad_enabled(False)
    modes.put_back()
    assert torch.is_grad_enabled()
    assert [module.training for module in model.modules()] == [True, True, False]


class Merging(nn.Linear):
    """An adapter that is merged into its weights in evaluation."""

    merged = False

    def train(self, mode: bool = True) -> "Merging":
        super().train(mode)
        self.merged = not mode
        return self


def test_modes_are_restored_by_each_layers_own_train() -> None:
    inner = nn.Sequential(Merging(2, 2), nn.BatchNorm1d(2)).eval()
    model = nn.Sequential(Merging(2, 2), inner)
    modes = Modes(model)
    model.eval()
    assert model[0].merged
    modes.put_back()
    assert not model[0].merged
    assert inner[0].merged
    assert [module.training for module in model.modules()] == [True, True, False, False, False]


class Memory(nn.Module):
    """Keeps its newest inputs, or a cache, or counts."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.zeros(4, 2))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("cache", torch.zeros(2), persistent=False)


def test_buffers_written_by_a_forward_pass_are_named() -> None:
    model = nn.Sequential(Memory(), nn.BatchNorm1d(2))
    written = WrittenBuffers(model)
    assert written
    assert written.written() is None  # no pass has begun
    written.note()
    model[0].count += 1
    model[0].cache += 1
    model[1](torch.randn(4, 2))
    assert written.written() is None
    written.note()
    model[0].bank[2] = 1.0
    assert written.written() == "0.bank"
    assert written.written() is None
    written.note()
    model[0].bank = model[0].bank.clone()
    assert written.written() == "0.bank"
    written.note()
    model[0].bank.data = model[0].bank + 1.0
    assert written.written() == "0.bank"
    assert written.late() is None


def test_buffers_registered_later_are_named_once_a_pass() -> None:
    model = nn.Sequential(nn.Linear(2, 1))
    model.register_buffer("mean", None)
    written = WrittenBuffers(model)
    written.note()
    model[0].register_buffer("cache", torch.ones(3), persistent=False)
    assert written.late() is None
    model.mean = torch.ones(2)
    assert written.late() is None, "the pass has been looked at"
    written.note()
    assert written.late() == "mean"
    assert "buffer 'mean' was registered after prepare()" in late_buffer_note("mean")
