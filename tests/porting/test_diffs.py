"""Scripts whose lines look like ones that are carried over and are not: a diff leaves them right."""

from textwrap import dedent

import pytest

from paceline.porting.check import CheckResult, judge
from paceline.porting.reading import Source

MODEL = """\
import torch
from torch import nn
from torch.utils.data import DataLoader

model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
STEP = """\
optimizer.zero_grad()
model(x).square().mean().backward()
optimizer.step()
"""
TURN = "".join(f"    {one}\n" for one in STEP.splitlines())


def judged(text: str) -> CheckResult:
    return judge(Source(dedent(text)), "train.py")


def lines_of(text: str) -> list[str]:
    """What stands in the script with its diff, where it gets one."""
    found = judged(text)
    assert not found.reason
    return [one[1:] for one in found.diff.splitlines()[2:] if one[0] in " +"]


@pytest.mark.parametrize(
    ("first", "last"),
    [
        ("x = draw()\n", "    if done:\n        x = draw()\n"),
        ("x = draw()\n", "    if done: x = draw()\n"),
        ("x = draw()\nprint(x.shape)\n", "    x = draw()\n"),
        ("if fresh:\n    x = draw()\n", "    x = draw()\n"),
        (
            "x = draw()\n",
            "    print(x)\n    for _ in range(3):\n        y = x\n        x = draw()\n",
        ),
    ],
)
def test_what_is_used_beside_the_turn_that_draws_it_anew_stays(first: str, last: str) -> None:
    found = lines_of(f"{MODEL}{first}for it in range(100):\n{TURN}{last}")
    assert sum("x = draw()" in one for one in found) == 2


def test_a_batch_that_is_drawn_one_turn_ahead_is_drawn_in_its_own() -> None:
    """A function may call its own as the script does."""
    text = f"{MODEL}x = draw()\ndef draw():\n    x = torch.randn(2, 4)\n    return x\n"
    found = lines_of(f"{text}for it in range(100):\n{TURN}    x = draw()\n")
    assert [one for one in found if "x = draw()" in one] == ["        x = draw()"]
