"""From a small model to its cut and its table, measured here."""

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from paceline.collectives.base import LinkCost
from paceline.errors import ConfigError
from paceline.exports.subject import InputShape, Subject
from paceline.predict import measuring, split_costs
from paceline.predict.split_models import SplitQuestion
from paceline.predict.splitting import partition, plan_splits, wants_splits
from paceline.report.splits import draw_partition, render_partition, render_splits

FLOATS = (InputShape((16,), torch.float32),)


@pytest.fixture(autouse=True)
def no_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start no neighbour processes; test_neighbours.py tests them."""
    monkeypatch.setattr(split_costs, "neighbours", lambda *_: nullcontext())


def chain() -> nn.Module:
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))


def branching() -> nn.Module:
    from hard_to_cut import Branching

    return Branching(16)


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


def huge() -> nn.Module:
    """510 million parameters in ten layers."""
    return nn.Sequential(*(nn.Linear(7141, 7141, bias=False) for _ in range(10)))


def broken() -> nn.Module:
    raise ValueError("no weights here")


def question(name: str, num_workers: int, **changes: object) -> SplitQuestion:
    given = {"inputs": FLOATS, "micro_batches": 4, "batch_size": 16}
    return SplitQuestion(spec=f"{__name__}:{name}", num_workers=num_workers, **(given | changes))


def test_small_model_is_cut_optimally_and_advised_not_to_split(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    far = LinkCost(latency_s=0.02, s_per_byte=0.0)  # more than the layers take on a busy machine
    monkeypatch.setattr(split_costs, "measure_loopback", lambda: far)
    report = partition(question("chain", 3))
    placement = report.found.placement
    assert sum(len(part.nodes) for part in placement.parts) == 6
    steps = {row.name: row.placement.step_s for row in report.rows}
    rows = {row.name: row for row in report.rows}
    close = 1.01  # they are chosen by updates that do not share the cores
    assert rows["of all cuts"].step_s <= rows["best"].step_s * close
    assert steps["best"] <= steps["even"] * (1 + 1e-9)
    assert rows["best"].step_s <= rows["even"].step_s * close
    assert report.is_exact
    assert report.verdict.startswith("do not split for speed")
    # The choice between the two depends on timings here; test_prices.py has given costs.
    assert plan_splits(question("chain", 3)).table.advised.name in ("none", "data")
    json.dumps(report.to_json())


def test_text_names_parts_borders_and_other_cuts() -> None:
    report = partition(question("chain", 2))
    text = "\n".join(render_partition(report))
    assert "6 pieces by torch.fx" in text
    assert "inputs -> [ 0" in text
    assert "5 ] -> outputs" in text
    for name in ("best", "even", "of all cuts", "none"):
        assert f"\n{name} " in text
    picture = draw_partition(report)
    # background, pieces, F and B of 4 in 2 parts; and work at the end of a part, if any
    assert picture.count("<rect") - (1 + 6 + 2 * 2 * 4) in (0, 1, 2)


def test_table_lists_all_splits() -> None:
    report = plan_splits(question("chain", 4))
    names = [price.name for price in report.table.prices]
    assert names == ["none", "data", "network", "layer", "shard-1", "shard-2", "shard-3", "2x2"]
    text = "\n".join(render_splits(report))
    assert "advice: " in text
    json.dumps(report.to_json())


def test_plan_names_the_pipeline_schedule() -> None:
    request = question("chain", 2, micro_batches=None)
    message = "as many micro-batches as a run uses, with gpipe unless 1f1b or interleaved is named"
    assert dict(plan_splits(request).about)["batch"] == f"16 samples an update, {message}"
    named = question("chain", 2, micro_batches=None, schedule="1f1b")
    assert dict(plan_splits(named).about)["batch"].endswith("as a run uses, with 1f1b")


def test_branching_model_is_reported_with_its_line() -> None:
    with pytest.raises(ConfigError, match=r"only 1 piece .* is kept whole: .*hard_to_cut.py:\d+"):
        partition(question("branching", 2))
    report = plan_splits(question("branching", 2))
    kept = dict(report.about)["kept whole"]
    assert "hard_to_cut.py:" in kept
    network = next(price for price in report.table.prices if price.name == "network")
    assert network.step_s is None


def test_batch_norm_is_named() -> None:
    report = plan_splits(question("normed", 2, micro_batches=None))
    assert dict(report.about)["batch norm"].startswith("1 use statistics of a whole batch")
    prices = {price.name: price for price in report.table.prices}
    assert prices["network"].step_s is not None
    assert prices["layer"].step_s is None
    assert "batch norm" in prices["layer"].why or "no two layers" in prices["layer"].why
    for ask in (partition, plan_splits):
        with pytest.raises(ConfigError, match="a run takes one micro-batch of each worker: leave"):
            ask(question("normed", 2, micro_batches=4))
    assert partition(question("normed", 2, micro_batches=None)).rows


def test_large_model_gets_the_table_and_a_split_as_advice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only its shapes are made."""
    wide = (InputShape((7141,), torch.float32),)
    request = question("huge", 4, inputs=wide)
    assert wants_splits(request)
    assert not wants_splits(question("chain", 4))
    monkeypatch.setattr(split_costs, "is_too_large", lambda model: True)
    report = plan_splits(request)
    assert report.notes[0].startswith("509,938,810 parameters: from 500,000,000 on")
    assert report.table.advised.name not in ("none", "data")
    assert dict(report.about)["costs"].startswith("counted, not measured")
    tight = plan_splits(question("huge", 4, inputs=wide, memory_bytes=4 << 30))
    assert any(note.startswith("one copy does not fit") for note in tight.notes)
    assert tight.table.advised.fits


def test_optimizer_that_cannot_step_is_named() -> None:
    task: Any = SimpleNamespace(
        optimizer=lambda parameters, lr: torch.optim.LBFGS(parameters, lr=lr), learning_rate=0.1
    )
    subject = Subject(name="own", model=chain(), inputs=lambda size: (torch.ones(size, 16),),
                      task=task, checkpoint=None)  # fmt: skip
    with pytest.raises(ConfigError, match=r"the optimizer of own cannot step: .*closure"):
        measuring.update_costs(subject, is_counted=False)


def test_tensors_made_at_import_keep_their_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "import torch\nSCALE = torch.ones(2)\ndef net():\n    return torch.nn.Linear(2, 2)\n"
    (tmp_path / "scaled_net.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    shape = (InputShape((2,), torch.float32),)
    assert not wants_splits(SplitQuestion(spec="scaled_net:net", num_workers=2, inputs=shape))
    assert sys.modules["scaled_net"].SCALE.tolist() == [1.0, 1.0]


def test_invalid_questions_get_a_short_error() -> None:
    with pytest.raises(ConfigError, match=r"7 parts are wanted, but .* 6 pieces .* write -n 6"):
        partition(question("chain", 7))
    with pytest.raises(ConfigError, match="2 samples cannot be 4 equal micro-batches; 2 are"):
        partition(question("chain", 2, batch_size=2))
    with pytest.raises(ConfigError, match=r"--memory 1.0 MiB is less than Python and torch"):
        partition(question("chain", 2, memory_bytes=1 << 20))
    with pytest.raises(ConfigError, match="your own model needs the shape"):
        partition(question("chain", 2, inputs=()))
    with pytest.raises(ConfigError, match=r"could not be made: .*no weights here .*py:\d+"):
        partition(question("broken", 2))
    with pytest.raises(ConfigError, match="--micro-batches must be >= 1, got 0"):
        question("chain", 2, micro_batches=0)
