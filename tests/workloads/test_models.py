"""The networks match the chapter: sizes, initialisation, settings."""

import pytest
import torch
from torch import nn

from paceline.data.fetch import Choice
from paceline.errors import ConfigError
from paceline.workloads import images, load_task, resnets, transformer
from paceline.workloads.resnets import BasicBlock


def on_fashion(name: str) -> Choice:
    return Choice(name=name)


def on_digits(name: str) -> Choice:
    return Choice(name="digits", note="the digits stand in")


@pytest.mark.parametrize(
    ("name", "num_parameters", "batch_size", "learning_rate"),
    [
        ("softmax", 7_850, 256, 0.1),
        ("mlp", 5_824_522, 256, 0.1),
        ("lenet", 129_068, 256, 0.2),
        ("resnet18", 11_175_818, 256, 0.1),
    ],
)
def test_sizes_and_settings_match_the_chapter(
    name: str, num_parameters: int, batch_size: int, learning_rate: float
) -> None:
    task = load_task(name, 1, None, on_fashion)
    assert sum(parameter.numel() for parameter in task.model().parameters()) == num_parameters
    assert (task.batch_size, task.learning_rate, task.epochs) == (batch_size, learning_rate, 10)


def test_mlp488k_normalises_its_features_and_has_488_k_parameters() -> None:
    task = load_task("mlp488k", 1, None, on_digits)
    model = task.model()
    assert sum(parameter.numel() for parameter in model.parameters()) == 488_022
    assert not list(model.buffers())
    inputs = images.fetch_inputs(task.data().train, 2_000)
    normal = model.get_submodule("normalize")(inputs.flatten(1).double())
    assert normal.mean(dim=0).abs().max() < 1e-4
    live = inputs.flatten(1).std(dim=0) > 0.05
    assert torch.allclose(normal.std(dim=0)[live], torch.ones(1).double(), atol=1e-4)
    assert isinstance(task.optimizer(model.parameters(), 1e-4), torch.optim.Adam)


def test_resnet50_has_the_published_number_of_parameters() -> None:
    """25,557,032 with 1,000 classes and three colours, as published."""
    assert (
        sum(parameter.numel() for parameter in resnets.build_resnet50(1000, 3).parameters())
        == 25_557_032
    )
    task = load_task("resnet50", 1, None, on_fashion)
    optimizer = task.optimizer(task.model().parameters(), task.learning_rate)
    assert isinstance(optimizer, torch.optim.Adam)
    assert task.learning_rate == 3e-4


def test_alexnet_has_the_published_number_of_parameters() -> None:
    """61,100,840 with 1,000 classes and three colours."""
    with torch.device("meta"):
        assert (
            sum(parameter.numel() for parameter in images.build_alexnet(1000, 3).parameters())
            == 61_100_840
        )
    assert sum(parameter.numel() for parameter in images.build_alexnet().parameters()) == 57_029_322


def test_transformer_is_causal() -> None:
    torch.manual_seed(0)
    model = transformer.build(depth=2, width=64).eval()
    inputs = torch.randint(0, 256, (2, 16))
    other = inputs.clone()
    other[:, 9:] = 0
    with torch.no_grad():
        before, after = model(inputs), model(other)
    assert torch.allclose(before[:, :9], after[:, :9], atol=1e-6)
    assert not torch.allclose(before[:, 9:], after[:, 9:], atol=1e-3)


def test_target_is_the_following_byte() -> None:
    splits = transformer.samples()
    inputs, targets = splits.train[3]
    assert torch.equal(inputs[1:], targets[:-1])
    assert torch.equal(splits.train[4][0][:1], targets[-1:])


def test_lenet_matches_the_chapter_layer_by_layer() -> None:
    shapes = [tuple(p.shape) for p in load_task("lenet", 1, None, on_fashion).model().parameters()]
    assert shapes[::2] == [(20, 1, 3, 3), (50, 20, 5, 5), (128, 800), (10, 128)]
    assert shapes[1::2] == [(20,), (50,), (128,), (10,)]


def test_init_of_the_chapter_has_small_weights_and_zero_biases() -> None:
    torch.manual_seed(0)
    for name, parameter in load_task("lenet", 1, None, on_fashion).model().named_parameters():
        if name.endswith("bias"):
            assert not parameter.any()
        else:
            assert parameter.std().item() == pytest.approx(0.01, rel=0.15)


def test_slow_start_is_noted_only_for_the_init_of_the_chapter() -> None:
    assert "0.10" in load_task("lenet", 1, None, on_fashion).notes[0]
    assert load_task("lenet", 1, "default", on_fashion).notes == ()


def test_default_init_is_that_of_torch() -> None:
    torch.manual_seed(5)
    layer = nn.Conv2d(1, 20, kernel_size=3)
    torch.manual_seed(5)
    model = load_task("lenet", 1, "default", on_fashion).model()
    assert torch.equal(next(model.parameters()), layer.weight)


@pytest.mark.parametrize(("num_workers", "batch_size"), [(1, 256), (2, 512), (4, 1024)])
def test_resnet18_scales_batch_and_learning_rate_with_the_workers(
    num_workers: int, batch_size: int
) -> None:
    task = load_task("resnet18", num_workers, None, on_fashion)
    assert task.batch_size == batch_size
    assert task.learning_rate == pytest.approx(0.1 * num_workers)
    assert any("linear scaling" in note for note in task.notes) == (num_workers > 1)


def test_resnet18_keeps_resolution_in_stage_one_and_halves_thrice() -> None:
    sides: list[int] = []
    model = resnets.build_resnet18().eval()
    for layer in model.modules():
        if isinstance(layer, BasicBlock):
            layer.register_forward_hook(lambda _, __, output: sides.append(output.shape[-1]))
    with torch.no_grad():
        model(torch.zeros(1, 1, 28, 28))
    assert sides == [28, 28, 14, 14, 7, 7, 4, 4]
    assert not any(isinstance(layer, nn.MaxPool2d) for layer in model.modules())


def test_zero_residual_block_passes_the_relu_of_its_input() -> None:
    block = BasicBlock(3, 3, 1).eval()
    for parameter in block.branch.parameters():
        nn.init.zeros_(parameter)
    inputs = torch.randn(2, 3, 5, 5)
    assert torch.equal(block(inputs), inputs.relu())


@pytest.mark.parametrize(
    ("name", "init"), [("lenet", "zeros"), ("mlp", "chapter"), ("quadratic", "chapter")]
)
def test_unknown_init_is_refused(name: str, init: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown initialisation '{init}' .task {name}.*default"):
        load_task(name, 1, init, on_fashion)


def test_batches_on_digits_are_small_enough() -> None:
    for name in ("softmax", "mlp", "lenet", "resnet18"):
        task = load_task(name, 1, None, on_digits)
        assert len(task.data().train) / task.batch_size > 20
