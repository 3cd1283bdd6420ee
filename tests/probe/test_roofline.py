"""A model below the ceilings: operations and bytes as counted by hand, rates from the probe."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import ConfigError
from paceline.exports.subject import Subject
from paceline.machine.ceilings import write_machine
from paceline.probe.roofline import BETWEEN, draw_roofline, measure_roofline, render_roofline

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def subject(*layers: nn.Module) -> Subject:
    return Subject(name="net", model=nn.Sequential(*layers), inputs=lambda n: (torch.ones(n, 6),))


def test_operations_and_bytes_are_counted_per_layer() -> None:
    write_machine({"matmul_fp32_op_per_s": 1e11, "memory_read_bytes_per_s": 1e10})
    shared = nn.Linear(6, 6, bias=False)
    net = subject(nn.Unflatten(1, (2, 3)), nn.Flatten(), shared, nn.ReLU(inplace=True), shared)
    result = measure_roofline(net, 4, CPU)
    layers = {layer.name: layer for layer in result.layers}
    assert list(layers) == ["0", "1", "2", "3"]  # a module used twice is one layer
    assert layers["0"].bound == layers["1"].bound == "nothing"
    assert layers["2"].operations == 2 * (2 * 4 * 6 * 6)
    assert layers["2"].num_bytes == 2 * 4 * (4 * 6 + 4 * 6 + 6 * 6)
    assert layers["3"].num_bytes == 2 * 4 * (4 * 6)
    assert layers["2"].bound == "memory"  # 288 operations in 3 ns, 336 bytes in 34 ns
    assert layers["2"].share == pytest.approx(67.2e-9 / layers["2"].took_s, rel=0.01)
    text = "\n".join(render_roofline(result))
    assert "100 Gop/s, 10 GB/s, which meet at 10 operations a byte (paceline probe, 2" in text
    root = ElementTree.fromstring(draw_roofline(result))
    assert len(list(root.iter("{http://www.w3.org/2000/svg}circle"))) == 1


class Attending(nn.Module):
    """Attention with another module's weights, attention in a function, and a shared weight."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.out = nn.Linear(6, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.unsqueeze(0)
        (seen,) = self.attention(rows, rows, rows)[0]
        heads = self.out(seen).view(1, 1, *x.shape)
        again = nn.functional.scaled_dot_product_attention(heads, heads, heads)
        return nn.functional.linear(again[0, 0], self.out.weight)


def test_work_outside_layers_has_its_own_row() -> None:
    """With four rows of six a projection is 2 * 4 * 6 * 6 operations, an attention 2 * 2 * 96."""
    write_machine({"matmul_fp32_op_per_s": 1e11, "memory_read_bytes_per_s": 1e10})
    net = Subject(name="net", model=Attending(), inputs=lambda n: (torch.ones(n, 6),))
    was_enabled = torch.backends.mha.get_fastpath_enabled()
    result = measure_roofline(net, 4, CPU)
    assert torch.backends.mha.get_fastpath_enabled() == was_enabled
    layers = {layer.name: layer for layer in result.layers}
    assert list(layers) == ["attention", "out", BETWEEN]
    project, attend = 2 * 4 * 6 * 6, 2 * (2 * 4 * 4 * 6)
    assert layers["attention"].kind == "MultiheadAttention"
    assert layers["attention"].operations == 4 * project + attend
    assert layers["out"].operations == project
    assert layers[BETWEEN].operations == attend + project
    assert layers[BETWEEN].num_bytes >= 4 * (4 * 6 + 6 * 6 + 4 * 6)  # only of the last product
    assert 0 < layers[BETWEEN].took_s < result.took_s
    assert result.took_s == pytest.approx(sum(layer.took_s for layer in result.layers))
    assert BETWEEN in "\n".join(render_roofline(result))
    root = ElementTree.fromstring(draw_roofline(result))
    assert len(list(root.iter("{http://www.w3.org/2000/svg}circle"))) == 3


def test_model_without_submodules_is_one_layer() -> None:
    write_machine({"matmul_fp32_op_per_s": 1e11, "memory_read_bytes_per_s": 1e10})
    net = Subject(name="net", model=nn.Linear(6, 6), inputs=lambda n: (torch.ones(n, 6),))
    assert [layer.name for layer in measure_roofline(net, 4, CPU).layers] == ["(model)"]


def test_unprobed_machine_is_referred_to_probe() -> None:
    with pytest.raises(ConfigError, match="run paceline probe first"):
        measure_roofline(subject(nn.Linear(6, 6)), 4, CPU)


def test_model_that_does_not_run_is_refused() -> None:
    write_machine({"matmul_fp32_op_per_s": 1e11, "memory_read_bytes_per_s": 1e10})
    with pytest.raises(ConfigError, match="the model does not run: "):
        measure_roofline(subject(nn.Linear(7, 6)), 4, CPU)
    with pytest.raises(ConfigError, match="--batch-size must be >= 1"):
        measure_roofline(subject(nn.Linear(6, 6)), 0, CPU)
