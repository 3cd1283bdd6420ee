"""The value of copies and layouts, and where CPU and device cross; counted or measured."""

import pytest
import torch
from torch import nn

from paceline.bench.samples import Gain, Timing
from paceline.errors import ConfigError
from paceline.exports.subject import Subject
from paceline.probe import copies
from paceline.probe.copies import BatchRow, Copies, CopyWay, measure_copies, render_copies

CPU = torch.device("cpu")
ROWS = tuple(
    BatchRow(batch_size=size, cpu_s=cpu_s, device_s={"T4": 1.0, "slow": 9.0})
    for size, cpu_s in ((1, 0.5), (4, 2.0), (16, 8.0))
)


def images(layer: nn.Module) -> Subject:
    return Subject(name="net", model=layer, inputs=lambda n: (torch.ones(n, 3, 6, 6),))


def test_crossing_is_the_batch_from_which_the_device_is_faster() -> None:
    gains = (Gain(speedup=1.0, call_s=0.0, is_faster=False), Gain(
        speedup=1.25, call_s=0.25, is_faster=True,
    ))  # fmt: skip
    plain, pinned = (
        CopyWay(name=name, timing=Timing(name=name, samples_s=(1.0,)), gain=gain)
        for name, gain in zip(("plain", "pinned"), gains, strict=True)
    )
    result = Copies(
        name="net", device="cuda:0", batch_size=4, ways=(plain, pinned), batches=ROWS,
        is_counted=False, notes=("a note",),
    )  # fmt: skip
    assert result.crossing("T4") == 4
    assert result.crossing("slow") is None
    text = "\n".join(render_copies(result))
    assert "T4: faster from batch 4" in text
    assert "slow: never faster at these batches" in text
    assert "x 1.25  faster" in text
    assert "slower" not in text  # the baseline is not slower than itself
    assert "counted" not in text


def test_device_times_are_estimated_without_a_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(copies, "BATCHES", (1, 2))
    monkeypatch.setattr(copies, "_ROUNDS", 2)
    result = measure_copies(images(nn.Conv2d(3, 4, 3)), 2, CPU, lambda line: None)
    assert [way.name for way in result.ways] == ["channels first", "channels last"]
    assert [batch.batch_size for batch in result.batches] == [1, 2]
    one, two = (row.device_s["T4"] for row in result.batches)
    assert copies.LAUNCH_S < one < two
    assert "estimated, not measured: 70%" in "\n".join(render_copies(result))
    assert "pinned memory and non_blocking gain nothing" in result.notes[0]


def test_model_that_needs_two_samples_starts_with_the_next_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(copies, "BATCHES", (1, 2))
    normed = Subject(name="net", model=nn.BatchNorm1d(6), inputs=lambda n: (torch.ones(n, 6),))
    result = measure_copies(normed, 2, CPU, lambda line: None)
    assert [batch.batch_size for batch in result.batches] == [2]
    assert "a batch of one sample" in result.notes[-1]
    assert "more than 1 value per channel" in result.notes[-1]
    with pytest.raises(ConfigError, match=r"the model does not run: .*more than 1 value per"):
        copies._Step(normed, 1, CPU).run((torch.ones(1, 6),))


def test_views_are_not_counted_as_device_operations() -> None:
    one = torch.ones(4, 8)
    with copies.Launches() as seen:
        one.t().detach().t().view(4, 8).unsqueeze(0).expand(2, 4, 8)
    assert (seen.count, seen.num_bytes) == (0, 0)
    with copies.Launches() as seen:
        one.add_(1)
        one.t().relu()
    assert (seen.count, seen.num_bytes) == (2, 2 * 2 * 4 * 8 * 4)


def test_model_that_does_not_run_is_refused() -> None:
    with pytest.raises(ConfigError, match="the model does not run: "):
        measure_copies(images(nn.Linear(5, 2)), 2, CPU, lambda line: None)
    with pytest.raises(ConfigError, match="--batch-size must be >= 1"):
        measure_copies(images(nn.Conv2d(3, 4, 3)), 0, CPU, lambda line: None)
