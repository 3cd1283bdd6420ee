"""What is said beside a diff: of what a turn leaves to the next, and of where a loop is left."""

import libcst as cst
import pytest

from paceline.porting.dataflow import Flow
from paceline.porting.leftovers import leftovers
from paceline.porting.notes import notes_of_loop
from paceline.porting.tree import SourceTree

SCRIPT = """\
import torch
from torch import nn

model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
kept = []


def draw():
    kept.append(model(torch.randn(8, 4)).mean())


for it in range(9):
    draw()
    optimizer.zero_grad()
    torch.stack(kept).mean().backward()
    optimizer.step()
    END
"""


def found(text: str) -> list[tuple[str, bool]]:
    script = SourceTree(text)
    loop = next(one for one in script.nodes if isinstance(one, cst.For))
    return [(one.name, one.is_visible) for one in leftovers(Flow(script), loop)]


@pytest.mark.parametrize("end", ["kept.clear()", "del kept[:]", "kept = []", "kept = list()"])
def test_what_a_turn_collects_and_clears_at_its_end_is_left_over(end: str) -> None:
    assert found(SCRIPT.replace("END", end)) == [("kept", True)]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("END", "if len(kept) > 30:\n        kept.clear()"),  # kept on purpose
        ("END", "pass"),
        ("END", "del kept[0]"),
        ("    draw()", "    kept.clear()\n    draw()"),  # first thing in the turn
    ],
)
def test_what_is_kept_on_purpose_or_cleared_before_is_not(old: str, new: str) -> None:
    assert found(SCRIPT.replace(old, new).replace("END", "kept.clear()")) == []


def test_what_a_function_makes_for_itself_is_not() -> None:
    own = "def draw():\n    own = []\n    own.append(1)\n    own.clear()\n"
    text = SCRIPT.replace("END", "pass").replace("def draw():\n", own)
    assert found(text) == []


def test_what_another_function_calls_by_its_own_name_is_told_and_not_written() -> None:
    text = SCRIPT.replace("END", "rest(kept)").replace(
        "for it", "def rest(these):\n    these.append(0)\n    these.clear()\n\n\nfor it"
    )
    assert found(text) == [("these", False)]


DIVIDED = """\
import torch
from torch import nn
from torch.utils.data import DataLoader

model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(data, batch_size=8)
right = 0
for inputs, targets in loader:
    optimizer.zero_grad()
    outputs = model(inputs)
    nn.functional.cross_entropy(outputs, targets).backward()
    optimizer.step()
    right += int((outputs.argmax(1) == targets).sum())
print("accuracy", 100.0 * right / len(loader.dataset))
"""


def means_of(text: str) -> list[str]:
    return [one for one in notes_of_loop(text, "train.py") if "divides right" in one]


def test_a_count_of_a_part_that_is_divided_by_all_samples_is_said() -> None:
    [said] = means_of(DIVIDED)
    assert said.startswith("train.py:15 divides right, which each worker adds up over its share")
    assert "pace.sum(right)" in said


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("len(loader.dataset)", "len(test.dataset)"),
        ("right / len", "others / len"),
        ("right += ", "right = "),
        ("len(loader.dataset)", "seen"),
    ],
)
def test_other_divisions_are_not(old: str, new: str) -> None:
    assert means_of(DIVIDED.replace(old, new)) == []


def test_each_is_a_sentence_with_its_line() -> None:
    text = SCRIPT.replace("for it in range(9)", "while True").replace("END", "kept.clear()")
    said = list(notes_of_loop(text + "    if loss > 3:\n        break\n", "train.py"))
    assert any(one.startswith("train.py:18 clears kept at the end of an iteration") for one in said)
    assert any(one.startswith("train.py:20 ends the run where one worker") for one in said)


def test_a_mean_over_the_batches_of_one_process_is_said() -> None:
    [said] = means_of(DIVIDED.replace("len(loader.dataset)", "len(loader)"))
    assert said.startswith("train.py:15 divides right by the number of batches: where workers do")
    assert means_of(DIVIDED.replace("len(loader.dataset)", "len(test)")) == []


HELD = """\
import torch
from torch import nn


class Net(nn.Linear):
    def keep(self, x):
        self.data.append(self(x).mean())

    def learn(self):
        optimizer.zero_grad()
        torch.stack(self.data).mean().backward()
        optimizer.step()
        self.data = []


net = Net(4, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for it in range(9):
    net.keep(torch.randn(8, 4))
    net.learn()
"""


def test_what_an_object_collects_is_cleared_by_its_name_in_the_turn() -> None:
    assert found(HELD) == [("net.data", True)]
    two = HELD.replace("optimizer = ", "other = Net(4, 2)\noptimizer = ")
    assert found(two) == [("self.data", False)]


@pytest.mark.parametrize(("indent", "is_said"), [("    ", True), ("", False)])
def test_weights_that_are_loaded_between_epochs_are_said(indent: str, is_said: bool) -> None:
    head, loop = DIVIDED.split("for inputs")
    body = "".join(f"    {row}\n" for row in f"for inputs{loop}".splitlines())
    text = f"{head}for epoch in range(3):\n{body}{indent}model.load_state_dict(best)\n"
    said = [one for one in notes_of_loop(text, "train.py") if "loads weights into model" in one]
    assert bool(said) is is_said
    assert all("write pace.publish(model) after it" in one for one in said)


@pytest.mark.parametrize(
    ("shown", "is_said"),
    [
        ("(i + 1) * len(x)", True),
        ("i * len(x)", True),
        ("i + len(x)", False),
        ("2 * len(x)", False),
    ],
)
def test_progress_by_the_length_of_a_batch_is_said(shown: str, is_said: bool) -> None:
    text = DIVIDED.replace("for inputs, targets in loader", "for i, (x, y) in enumerate(loader)")
    text = text.replace("inputs", "x").replace("targets", "y")
    text = text.replace("    right", f"    print({shown})\n    right")
    said = [one for one in notes_of_loop(text, "train.py") if "counts samples by len(x)" in one]
    assert [one.partition(" ")[0] for one in said] == ["train.py:14"] * is_said
