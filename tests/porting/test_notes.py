"""Notes beside a diff: state carried between iterations, and exits from a loop."""

import libcst as cst
import pytest

from paceline.porting.dataflow import Flow
from paceline.porting.leftovers import leftovers
from paceline.porting.loops import Stepping
from paceline.porting.notes import notes_of_loop
from paceline.porting.rewrite import port
from paceline.porting.tree import SourceTree
from paceline.porting.whole_batch import whole_batch

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


def noted_collections(text: str) -> list[tuple[str, bool]]:
    script = SourceTree(text)
    loop = next(node for node in script.nodes if isinstance(node, cst.For))
    return [(one.name, one.is_visible) for one in leftovers(Flow(script), loop)]


@pytest.mark.parametrize("end", ["kept.clear()", "del kept[:]", "kept = []", "kept = list()"])
def test_collection_cleared_at_the_end_of_an_iteration_is_noted(end: str) -> None:
    assert noted_collections(SCRIPT.replace("END", end)) == [("kept", True)]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("END", "if len(kept) > 30:\n        kept.clear()"),  # kept on purpose
        ("END", "pass"),
        ("END", "del kept[0]"),
        ("    draw()", "    kept.clear()\n    draw()"),  # first in the iteration
    ],
)
def test_collection_kept_or_cleared_earlier_is_not_noted(old: str, new: str) -> None:
    assert noted_collections(SCRIPT.replace(old, new).replace("END", "kept.clear()")) == []


def test_local_collection_of_a_function_is_not_noted() -> None:
    own = "def draw():\n    own = []\n    own.append(1)\n    own.clear()\n"
    text = SCRIPT.replace("END", "pass").replace("def draw():\n", own)
    assert noted_collections(text) == []


def test_collection_renamed_by_a_function_is_noted_but_not_edited() -> None:
    text = SCRIPT.replace("END", "rest(kept)").replace(
        "for it", "def rest(these):\n    these.append(0)\n    these.clear()\n\n\nfor it"
    )
    assert noted_collections(text) == [("these", False)]


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


def test_partial_count_divided_by_all_samples_is_noted() -> None:
    [output] = means_of(DIVIDED)
    assert output.startswith("train.py:15 divides right, which each worker adds up over its share")
    assert "pace.sum(right)" in output


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("len(loader.dataset)", "len(test.dataset)"),
        ("right / len", "others / len"),
        ("right += ", "right = "),
        ("len(loader.dataset)", "seen"),
    ],
)
def test_other_divisions_are_not_noted(old: str, new: str) -> None:
    assert means_of(DIVIDED.replace(old, new)) == []


def test_each_note_is_a_sentence_with_its_line() -> None:
    text = SCRIPT.replace("for it in range(9)", "while True").replace("END", "kept.clear()")
    messages = list(notes_of_loop(text + "    if loss > 3:\n        break\n", "train.py"))
    assert any(
        message.startswith("train.py:18 clears kept at the end of an iteration")
        for message in messages
    )
    assert any(
        message.startswith("train.py:20 ends the run where one worker") for message in messages
    )


@pytest.mark.parametrize(
    "bar", ["tqdm(range(9), desc='x')", "tqdm.auto.tqdm(range(9))", "trange(9)"]
)
def test_progress_bar_that_is_replaced_is_noted(bar: str) -> None:
    text = SCRIPT.replace("END", "pass")
    assert not any("shows progress" in note for note in notes_of_loop(text, "train.py"))
    text = text.replace("range(9)", bar)
    assert bar not in port(text)
    [note] = [note for note in notes_of_loop(text, "train.py") if "shows progress" in note]
    assert note.startswith(f"train.py:13 shows progress by {bar}, which pace.updates replaces")


def test_sum_divided_by_the_number_of_batches_is_noted() -> None:
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


def test_collection_of_an_object_is_cleared_by_the_objects_name() -> None:
    assert noted_collections(HELD) == [("net.data", True)]
    two = HELD.replace("optimizer = ", "other = Net(4, 2)\noptimizer = ")
    assert noted_collections(two) == [("self.data", False)]


@pytest.mark.parametrize(("indent", "is_said"), [("    ", True), ("", False)])
def test_weights_loaded_between_epochs_are_noted(indent: str, is_said: bool) -> None:
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
def test_progress_counted_by_the_length_of_a_batch_is_noted(shown: str, is_said: bool) -> None:
    text = DIVIDED.replace("for inputs, targets in loader", "for i, (x, y) in enumerate(loader)")
    text = text.replace("inputs", "x").replace("targets", "y")
    text = text.replace("    right", f"    print({shown})\n    right")
    said = [one for one in notes_of_loop(text, "train.py") if "counts samples by len(x)" in one]
    assert [one.partition(" ")[0] for one in said] == ["train.py:14"] * is_said


PAIRS = """\
import torch
from lightly.loss import NTXentLoss
from torch import nn
from torch.utils.data import DataLoader


class Compare(nn.Module):
    def forward(self, x):
        return PRODUCT.logsumexp(1).mean()


model = nn.Linear(4, 2)
fixed = torch.randn(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(data, batch_size=8)
compare = Compare().to("cpu")
for x, y in loader:
    optimizer.zero_grad()
    out = model(x)
    LOSS.backward()
    optimizer.step()
"""


def lines_of_pairs(product: str, loss: str) -> list[str]:
    text = PAIRS.replace("PRODUCT", product).replace("LOSS", loss)
    said = [one for one in notes_of_loop(text, "a.py") if "samples of a batch together" in one]
    assert list(notes_of_loop(text, "a.py", is_per_worker=True)) == []
    return [one.partition(" ")[0] for one in said]


@pytest.mark.parametrize(
    "product",
    [
        "(x @ x.T)",
        "x.matmul(x.mT)",
        "x.mm(x.transpose(1, 0))",
        "torch.matmul(x, x.t())",
        "torch.mm(x, x.transpose(0, 1))",
        "torch.cdist(x, x)",
    ],
)
def test_loss_over_pairs_of_samples_is_noted(product: str) -> None:
    assert lines_of_pairs(product, "compare(out)") == ["a.py:9"]
    assert lines_of_pairs(product, "out.mean()") == []  # not called


@pytest.mark.parametrize(
    "product",
    [
        "(x @ torch.eye(2).T)",
        "(x @ fixed.t())",
        "x @ self.weight.T",
        "x @ x",
        "x @ embed.weight.t()",
        "torch.trace(torch.mm(x, x.t()))",
    ],
)
def test_product_that_has_no_pairs_of_samples_is_not_noted(product: str) -> None:
    assert lines_of_pairs(product, "compare(out)") == []


@pytest.mark.parametrize(
    ("loss", "is_noted"),
    [
        ("((out - out.mean()) / (out.std() + 1e-8) * y).mean()", True),
        ("(out / out.std(0)).mean()", True),
        ("print(out / out.std()) or out.mean()", False),
        ("(out / out.std(dim=-1, keepdim=True)).mean()", False),
        ("(out / torch.std(out, 1)).mean()", False),
        ("NTXentLoss()(out, y)", True),
        ("nn.CrossEntropyLoss()(out, y)", False),
    ],
)
def test_loss_with_statistics_of_its_batch_is_noted(loss: str, is_noted: bool) -> None:
    assert lines_of_pairs("x", loss) == ["a.py:20"] * is_noted


def test_model_of_the_script_is_not_read_for_pairs_of_samples() -> None:
    text = PAIRS.replace("PRODUCT", "(x @ x.T)").replace("LOSS", "compare(out)")
    text = text.replace("model = nn.Linear(4, 2)", "model = Compare()").replace(
        "compare(out)", "out"
    )
    assert list(whole_batch(Stepping(Flow(SourceTree(text))))) == []
