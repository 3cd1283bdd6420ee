"""The plan of a run states in numbers what will happen."""

import dataclasses
import math

import pytest

from paceline.errors import ProtocolError
from paceline.plan import CompressionPrice, LayerParameters, Plan, format_bytes

PLAN = Plan(
    task="lenet", source="Fashion-MNIST (60,000 + 10,000)", workers=2, device="cpu",
    engine="local", path="peers", protocol="full-sync", mini_batch_size=128,
    pushes_per_update=2, samples_per_update=256, updates_per_epoch=235, epochs=10,
    updates_total=2350, lr=0.2, num_parameters=112_060, update_bytes=896_480,
    shared_bytes=3_000_000, grain="between layers", notes=("accuracy stays near 0.10 at first",),
)  # fmt: skip


def test_plan_renders_one_row_per_fact() -> None:
    assert PLAN.render() == [
        "task             lenet",
        "data             Fashion-MNIST (60,000 + 10,000)",
        "workers          2 on cpu, engine local, between peers",
        "protocol         full-sync",
        "batch            256 samples an update = 2 x 128 (K x m)",
        "updates          2,350 (235 an epoch, 10 epochs)",
        "learning rate    0.2",
        "parameters       112,060",
        "bytes an update  875.5 KiB",
        "shared memory    2.9 MiB",
        "cancellation     between layers",
        "note             accuracy stays near 0.10 at first",
    ]


def test_uneven_mini_batches_are_reported() -> None:
    uneven = dataclasses.replace(
        PLAN, samples_per_update=100, pushes_per_update=3, mini_batch_size=34
    )
    assert dict(uneven.rows())["batch"] == "100 samples an update in K = 3 pushes of at most 34"


def test_unknown_values_are_left_out() -> None:
    vague = dataclasses.replace(
        PLAN, updates_total=None, updates_per_epoch=None, epochs=None, lr=math.nan
    )
    rows = dict(vague.rows())
    assert rows["updates"] == "until the script ends"
    assert rows["learning rate"] == "the optimizer has none"
    assert vague.to_json()["lr"] is None


PRICE = CompressionPrice(
    compressor="int8", plain_bytes=4 << 20, sent_bytes=1 << 20, spent_s=7.4e-3,
    plain_s=10.0e-3, sent_s=6.9e-3, latency_s=50e-6, bytes_per_s=118e6,
)  # fmt: skip


def test_compression_price_gives_a_verdict() -> None:
    loses = dataclasses.replace(PLAN, compression=PRICE)
    assert dict(loses.rows())["compress"] == (
        "int8: 4.0 MiB -> 1.0 MiB that a worker sends an update; compressing loses here: 3.1 ms "
        "saved, 7.4 ms spent (link: 118.0 MB/s, 50 us a message, measured)"
    )
    wins = dataclasses.replace(PRICE, plain_s=0.5)
    assert "compressing wins here: 493 ms saved, 7.4 ms spent" in wins.render()
    unknown = dataclasses.replace(PRICE, plain_s=None, sent_s=None)
    assert unknown.render().endswith("7.4 ms spent, what the link saves is not known")
    assert unknown.wins is None
    assert "compress" not in dict(PLAN.rows())


def test_plan_without_workers_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError, match="workers >= 1, got 0"):
        dataclasses.replace(PLAN, workers=0)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1,023 B"),
        (1024, "1.0 KiB"),
        (3.5 * 2**20, "3.5 MiB"),
        (2**50, "1024.0 TiB"),
    ],
)
def test_bytes_are_formatted_in_binary_units(num_bytes: float, text: str) -> None:
    assert format_bytes(num_bytes) == text


def test_layers_are_a_table_with_totals() -> None:
    layers = (
        LayerParameters("norm", "Normalize", "", 0, 0, 0),
        LayerParameters("net.0", "Linear", "406 x 784, 406", 318_710, 318_710, 1_274_840),
        LayerParameters("net.2", "Linear", "10 x 406, 10", 4_070, 0, 16_280),
    )
    plan = dataclasses.replace(PLAN, parameter_table=layers)
    assert plan.render()[-6:] == [
        "",
        "layer  type       shape           parameters  trainable     MB",
        "norm   Normalize                           0          0  0.000",
        "net.0  Linear     406 x 784, 406     318,710    318,710  1.275",
        "net.2  Linear     10 x 406, 10         4,070          0  0.016",
        "total                                322,780    318,710  1.291",
    ]
    assert plan.to_json()["parameter_table"][0]["kind"] == "Normalize"  # type: ignore[index]
