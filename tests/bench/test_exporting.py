"""The result of an export as JSON and as text."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.bench.exporting import Export, Latency, _accuracies, render_export
from paceline.bench.samples import Timing
from paceline.exports.proof import Written
from paceline.exports.reduced import Precision
from paceline.exports.subject import Subject
from paceline.workloads.base import classification_metrics
from tiny import CLASSES, TASK, WIDTH, samples

LATENCY = Latency(
    batch=7,
    model=Timing(name="model", samples_s=(0.002,)),
    file=Timing(name="file", samples_s=(0.001,)),
)
EXPORT = Export(
    subject="lenet", is_trained=True, format="aoti", precision=Precision.FP16, fell_back="",
    path=Path("lenet.pt2"), num_bytes=2048, weights_bytes=4096, max_differences={7: 1e-6},
    latencies=(LATENCY,), reduction=0.0125, accuracy=0.9, file_accuracy=0.875, accuracy_samples=60,
)  # fmt: skip


def test_json_has_only_names_and_numbers() -> None:
    report = json.loads(json.dumps(EXPORT.to_json()))
    assert (report["format"], report["precision"], report["path"]) == ("aoti", "fp16", "lenet.pt2")
    assert report["max_differences"] == {"7": 1e-6}
    assert [latency["batch"] for latency in report["latencies"]] == [7]
    assert report["latencies"][0]["file"]["median_s"] == 0.001


def test_report_states_size_accuracy_and_fallback() -> None:
    text = "\n".join(render_export(EXPORT))
    assert "lenet.pt2 (aoti, fp16)" in text
    assert "2.0 KiB on disk; the weights are 4.0 KiB" in text
    assert "change -0.0250; 60 test samples" in text
    assert "float32      an output differs by up to 1.25% of their spread" in text
    assert "example only" not in text
    text = "\n".join(render_export(replace(EXPORT, is_example_only=True)))
    assert "1.0e-06 (batch 7); proved on the example only" in text
    fresh = replace(
        EXPORT, is_trained=False, accuracy=None, fell_back="onnx: not here",
        why_no_accuracy="the weights are fresh",
    )  # fmt: skip
    text = "\n".join(render_export(fresh))
    assert "not measured: the weights are fresh" in text
    assert "note: not as onnx: not here" in text


class Model(nn.Linear):
    """A format whose file is the model itself."""

    def __init__(self) -> None:
        super().__init__(WIDTH, CLASSES, dtype=torch.float64)


def loss_alone(outputs: Tensor, targets: Tensor) -> dict[str, tuple[float, float]]:
    return {"loss": (1.0, 1.0)}


def called_otherwise(outputs: Tensor, targets: Tensor) -> dict[str, tuple[float, float]]:
    return {"val_accuracy": classification_metrics(outputs, targets)["acc"]}


@pytest.mark.parametrize(
    ("changed", "fixed_batch", "why"),
    [
        ({"metrics": loss_alone}, None, "the task measures no accuracy"),
        ({"metrics": called_otherwise}, None, ""),
        ({"data": lambda: replace(samples(), test=None)}, None, "there is no test data"),
        ({}, 18, "17 test samples are less than a batch of 18"),
    ],
    ids=["loss", "name", "data", "batch"],
)
def test_report_gives_the_reason_for_a_missing_accuracy(
    changed: dict[str, Any], fixed_batch: int | None, why: str
) -> None:
    task = replace(TASK, **changed)
    subject = Subject(
        name="tiny", model=Model(), inputs=lambda batch: (), task=task, checkpoint=Path("run"),
    )  # fmt: skip
    written = Written(
        path=Path("tiny.pt"), num_bytes=1, model=subject.model, run=subject.model, differences={},
    )  # fmt: skip
    result = _accuracies(subject, written, fixed_batch)
    assert result.get("why_no_accuracy", "").startswith(why)
    assert ("accuracy" in result) == (not why)
