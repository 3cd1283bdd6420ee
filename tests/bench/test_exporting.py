"""What an export came to, as JSON and in lines."""

import json
from dataclasses import replace
from pathlib import Path

from paceline.bench.exporting import Export, Latency, render_export
from paceline.bench.samples import Timing
from paceline.exports.reduced import Precision

LATENCY = Latency(
    batch=7,
    model=Timing(name="model", samples_s=(0.002,)),
    file=Timing(name="file", samples_s=(0.001,)),
)
EXPORT = Export(
    subject="lenet", is_trained=True, format="aoti", precision=Precision.FP16, fell_back="",
    path=Path("lenet.pt2"), num_bytes=2048, weights_bytes=4096, max_differences={7: 1e-6},
    latencies=(LATENCY,), accuracy=0.9, file_accuracy=0.875, accuracy_samples=60,
)  # fmt: skip


def test_the_json_has_names_and_numbers_only() -> None:
    found = json.loads(json.dumps(EXPORT.to_json()))
    assert (found["format"], found["precision"], found["path"]) == ("aoti", "fp16", "lenet.pt2")
    assert found["max_differences"] == {"7": 1e-6}
    assert [one["batch"] for one in found["latencies"]] == [7]
    assert found["latencies"][0]["file"]["median_s"] == 0.001


def test_the_lines_say_what_changed() -> None:
    text = "\n".join(render_export(EXPORT))
    assert "lenet.pt2 (aoti, fp16)" in text
    assert "2.0 KiB on disk; the weights are 4.0 KiB" in text
    assert "change -0.0250; 60 test samples" in text
    fresh = replace(EXPORT, is_trained=False, accuracy=None, fell_back="onnx: not here")
    text = "\n".join(render_export(fresh))
    assert "the weights are fresh" in text
    assert "note: not as onnx: not here" in text
