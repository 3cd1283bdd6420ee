"""Streams of Hugging Face ``datasets`` and torchdata loaders equal plain PyTorch."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import public_streams
import streamed
from meanwhile import stopped_at
from paceline.context import Context
from paceline.exchange.solo import SoloExchange
from paceline.script.worker import Pace
from reference import differ
from runs import run_script
from struck import kills

CLOSE = 1e-6
Say = Callable[[str], tuple[int, str, str]]
SCRIPT = Path(public_streams.__file__)
KINDS = {
    "mapped": "datasets", "batched": "datasets", "shuffled": "datasets", "interleaved": "datasets",
    "torchdata": "torchdata", "torchdata shuffled": "torchdata",
}  # fmt: skip
NUMBERS = Counter(range(2 * public_streams.SIZE // public_streams.BATCH_SIZE))


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Each kind whose package is installed."""
    name = str(request.param)
    pytest.importorskip(KINDS[name])
    if name != "torchdata":
        pytest.importorskip("datasets")
    return name


def test_single_process_equals_plain_pytorch_bitwise(kind: str) -> None:
    model, optimizer = streamed.make()
    loader = public_streams.loader_of({"kind": kind})
    for epoch in range(public_streams.EPOCHS):
        public_streams.set_epoch(loader, epoch)
        for batch in loader:
            optimizer.zero_grad()
            streamed.loss_of(model, batch).backward()
            optimizer.step()
    plain = streamed.gather(model)
    result = public_streams.train(Pace(SoloExchange(), Context(seed=5)), {"kind": kind})
    assert differ(result, plain) == 0.0


def test_killed_workers_do_not_change_the_result(kind: str, tmp_path: Path) -> None:
    """Including the worker that reads the stream."""
    options: dict[str, Any] = {"kind": kind}
    with kills(tmp_path, 3, seed=2) as seats:
        run = run_script(
            SCRIPT, tmp_path, str(tmp_path), json.dumps(options), workers=2, protocol="full-sync",
            seed=5, respawn=True, stall_after=60.0,
        )  # fmt: skip
    assert len(seats) == 3
    assert run.used() == [NUMBERS] * public_streams.EPOCHS
    result = torch.load(next(tmp_path.glob("result-*.pt")))
    assert differ(result, public_streams.twin(5, 2, options)) < CLOSE


def test_resumed_run_equals_an_uninterrupted_one(kind: str, say: Say, tmp_path: Path) -> None:
    options: dict[str, Any] = {"kind": kind, "step_s": 0.1, "say_at": 7}
    words = f"launch --workers 2 --device cpu --seed 5 --run-dir {tmp_path / 'run'}"
    with stopped_at(tmp_path / "is-there"):
        code, _, err = say(f"{words} {SCRIPT} {tmp_path} '{json.dumps(options)}'")
    assert code == 143, err
    saved = json.loads(max((tmp_path / "run" / "checkpoints").glob("*/run.json")).read_text())
    assert bool(saved["stream"]["state"]) == (kind in ("mapped", "batched", "torchdata"))
    options["step_s"] = 0.0
    words = f"launch --workers 2 --device cpu --resume {tmp_path / 'run'}"
    code, _, err = say(f"{words} {SCRIPT} {tmp_path} '{json.dumps(options)}'")
    assert code == 0, err
    result = torch.load(tmp_path / "result-0.pt")
    assert differ(result, public_streams.twin(5, 2, options)) < CLOSE


STATES = """
import torch, paceline
from torchdata.stateful_dataloader import StatefulDataLoader

pace = paceline.connect()
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = StatefulDataLoader([torch.ones(3)] * 8, batch_size=2)
{before}
model, optimizer, loader = pace.prepare(model, optimizer, loader)
for epoch in pace.epochs(1):
    for batch in loader:
        with pace.step():
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
    assert hasattr(loader, "state_dict")
    {after}
"""


@pytest.mark.parametrize(
    ("before", "after", "call"),
    [
        ("loader.load_state_dict(loader.state_dict())", "pass", "load_state_dict"),
        ("", "loader.load_state_dict({})", "load_state_dict"),
        ("", "loader.state_dict()", "state_dict"),
    ],
)
def test_state_of_a_shared_loader_is_refused(
    say: Say, tmp_path: Path, before: str, after: str, call: str
) -> None:
    """A single worker supports it, because it reads the loader itself."""
    pytest.importorskip("torchdata")
    script = tmp_path / "train.py"
    script.write_text(STATES.format(before=before, after=after))
    code, _, err = say(f"launch --workers 2 --device cpu --run-dir {tmp_path / 'run'} {script}")
    assert code != 0
    assert f"the loader's {call}() covers only its own reading" in err
    assert "Traceback" not in err


def test_single_process_loader_resumes_from_its_state() -> None:
    pytest.importorskip("torchdata")
    from torchdata.stateful_dataloader import StatefulDataLoader

    def begun() -> Any:
        loader = StatefulDataLoader([torch.tensor([float(one)]) for one in range(8)], batch_size=2)
        next(iter(loader))
        loader.load_state_dict(loader.state_dict())
        return loader

    pace, model = Pace(SoloExchange(), Context()), torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, _, loader = pace.prepare(model, optimizer, begun())
    results = [batch.flatten().tolist() for batch in loader]
    assert results == [batch.flatten().tolist() for batch in begun()] == [[2, 3], [4, 5], [6, 7]]
