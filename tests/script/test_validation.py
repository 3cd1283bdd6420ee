"""A loop that validates where it trains: inside its block, or with temporarily other weights."""

from pathlib import Path

import pytest

from paceline.errors import ConfigError
from runs import run_script

SCRIPT = """
import time, torch, paceline
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pace = paceline.connect()
torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0), nn.Linear(4, 1))
average = {name: one.detach().clone() for name, one in model.named_parameters()}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(data, batch_size=4))
inputs, _ = data[:]
"""

IN_THE_BLOCK = """
made = validated = 0

def validate():
    if pace.worker == 1:
        time.sleep(0.02)
        return
    model.eval()
    with torch.no_grad():
        for _ in range(10):
            time.sleep(0.01)
            model(inputs)
    model.train()

for _ in pace.epochs(4):
    for x, y in loader:
        with pace.step() as step:
            assert model.training and model[1].training and torch.is_grad_enabled()
            BEFORE
            optimizer.zero_grad()
            ((model(x) - y) ** 2).mean().backward()
            optimizer.step()
            made += 1
            BEHIND
            validated += 1
            assert not step.was_superseded
print(made, validated)
"""


def output_of(folder: Path, text: str, **settings: object) -> str:
    """The output of the first worker."""
    (folder / "train.py").write_text(SCRIPT + text)
    run = run_script(folder / "train.py", folder, workers=2, **settings)
    return (run.folder / "logs" / "worker-0.log").read_text()


def test_a_completed_step_is_not_called_off(tmp_path: Path) -> None:
    """Meanwhile the other worker calls off the next work many times."""
    text = IN_THE_BLOCK.replace("BEFORE", "pass").replace("BEHIND", "validate()")
    made, validated = map(int, output_of(tmp_path, text, protocol="k-sync:1").split())
    assert made == validated > 0


def test_a_step_that_is_called_off_leaves_the_models_mode_unchanged(tmp_path: Path) -> None:
    text = IN_THE_BLOCK.replace("BEHIND", "pass").replace("BEFORE", "validate()")
    output_of(tmp_path, text, protocol="k-sync:1")


AVERAGED = """
for _ in pace.epochs(2):
    for number, (x, y) in enumerate(loader):
        with pace.step():
            optimizer.zero_grad()
            ((model(x) - y) ** 2).mean().backward()
            optimizer.step()
        with torch.no_grad():
            for name, one in model.named_parameters():
                average[name].lerp_(one, 0.1)
            if pace.is_main and number % 4 == 1:
                EVALUATE
print(*(float(one.detach().sum()) for one in model.parameters()))
"""
COPIED = """
                kept = [one.data.clone() for one in model.parameters()]
                for name, one in model.named_parameters():
                    one.data.copy_(average[name])
                time.sleep(SECONDS)
                for one, before in zip(model.parameters(), kept):
                    one.data.copy_(before)
"""
POINTED = """
                kept = [one.data for one in model.parameters()]
                for name, one in model.named_parameters():
                    one.data = average[name]
                time.sleep(0.1)
                for one, before in zip(model.parameters(), kept):
                    one.data = before
"""
CALLED = """
                torch.func.functional_call(model, average, (inputs,))
                time.sleep(0.1)
"""
PEERS = {"protocol": "full-sync", "path": "peers"}


def test_swapping_weights_that_others_use_is_refused(tmp_path: Path) -> None:
    text = AVERAGED.replace("EVALUATE", COPIED.strip()).replace("SECONDS", "5")
    with pytest.raises(ConfigError, match=r"was changed after prepare.*torch\.func\.functional_"):
        output_of(tmp_path, text, **PEERS)


@pytest.mark.parametrize("way", [POINTED, CALLED], ids=["other memory", "functional_call"])
def test_swapping_memory_for_a_while_changes_nothing_for_others(tmp_path: Path, way: str) -> None:
    expected = output_of(tmp_path, AVERAGED.replace("EVALUATE", "pass"), **PEERS)
    (again := tmp_path / "again").mkdir()
    assert output_of(again, AVERAGED.replace("EVALUATE", way.strip()), **PEERS) == expected
