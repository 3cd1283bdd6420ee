"""Scripts whose training loop is in another file: a diff of both, or the lines and their places."""

import contextlib
import io
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline.context import Context
from paceline.porting.check import CheckResult, check
from paceline.porting.porting import check_script
from paceline.porting.project import files_with_loop, has_steps, join, placed, split
from paceline.porting.rewrite import port
from paceline.porting.tree import CannotDerive
from paceline.program import ScriptProgram
from paceline.script import worker
from runs import run_script

MAIN = '''\
"""Trains."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from engine import evaluate, train_one_epoch


def main(num_epochs):
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,)))
    loader = DataLoader(data, batch_size=16)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for epoch in range(num_epochs):
        loss = train_one_epoch(model, nn.CrossEntropyLoss(), loader, optimizer)
        scheduler.step()
        print("epoch", epoch, loss, evaluate(model, loader))
    torch.save(model.state_dict(), "end.pt")


if __name__ == "__main__":
    main(3)
'''
ENGINE = """\
from __future__ import annotations

import torch


def train_one_epoch(model, criterion, batches, optimizer):
    model.train()
    total = 0.0
    for x, y in batches:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total / len(batches)


@torch.no_grad()
def evaluate(model, batches):
    model.eval()
    return sum((model(x).argmax(1) == y).sum().item() for x, y in batches)
"""
TRAINER = """\
import torch
from tqdm import tqdm


class Fit:
    def __init__(self, *args, **options):
        self.model = options["model"].to("cpu")
        self.optimizer = options["optimizer"]
        self.scheduler = options["scheduler"]
        self.criterion = torch.nn.CrossEntropyLoss().to("cpu")

    def train(self, batches, num_epochs):
        for epoch in range(num_epochs):
            for x, y in tqdm(batches, disable=True):
                loss = self.criterion(self.model(x), y)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
            self.scheduler.step()
        return self.model.state_dict()
"""
WITH_TRAINER = MAIN.replace("from engine import evaluate, train_one_epoch", "from fit import Fit")
WITH_TRAINER = "".join(
    row
    for row in WITH_TRAINER.splitlines(keepends=True)
    if not row.startswith(("    for epoch", "        "))
).replace(
    "    torch.save",
    "    fit = Fit(model=model, optimizer=optimizer, scheduler=scheduler)\n"
    "    fit.train(loader, num_epochs)\n    torch.save",
)


def judged(folder: Path, main: str, others: dict[str, str]) -> CheckResult:
    (folder / "main.py").write_text(main)
    for name, text in others.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    with contextlib.chdir(folder):
        return check(ScriptProgram(path="main.py"))


def end_of(folder: Path) -> dict[str, Tensor]:
    """The weights that main.py ends with under plain python."""
    worker.start_context(None, Context())  # type: ignore[arg-type]  # none is started
    before = {*sys.modules}
    sys.path.insert(0, str(folder))
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
        runpy.run_path("main.py", run_name="__main__")
    sys.path.remove(str(folder))
    for name in {*sys.modules} & {"engine", "fit"} - before:
        del sys.modules[name]
    worker.start_context(None, Context())  # type: ignore[arg-type]  # none is started
    return torch.load(folder / "end.pt")


@pytest.mark.parametrize(
    ("main", "others", "changed"),
    [
        (MAIN, {"engine.py": ENGINE}, ["main.py", "engine.py"]),
        (WITH_TRAINER, {"fit.py": TRAINER}, ["main.py", "fit.py"]),
    ],
    ids=["a function for an epoch", "a class that is given all"],
)
def test_diff_of_both_files_computes_the_same(
    main: str, others: dict[str, str], changed: list[str], tmp_path: Path
) -> None:
    result = judged(tmp_path, main, others)
    assert result.reason == ""
    heads = [row for row in result.diff.splitlines() if row.startswith("+++ ")]
    assert heads == [f"+++ {name}" for name in changed if f"+++ {name}" in heads]
    assert heads[-1] == f"+++ {changed[-1]}"
    expected = end_of(tmp_path)
    subprocess.run(["patch", "-p0"], input=result.diff, text=True, check=True, cwd=tmp_path)
    actual = end_of(tmp_path)
    assert all(torch.equal(actual[key], expected[key]) for key in expected)
    with contextlib.chdir(tmp_path):  # where it saves its weights
        run = run_script(tmp_path / "main.py", tmp_path / "two", workers=2)
    assert {fact.ticket.member for fact in run.pushes} == {0, 1}
    assert [set(epoch.values()) for epoch in run.used()] == [{1}] * 3


def test_notes_name_the_file_that_their_line_is_in(tmp_path: Path) -> None:
    result = judged(tmp_path, MAIN, {"engine.py": ENGINE})
    [note] = [note for note in result.notes if "divides total" in note]
    assert note.startswith("engine.py:15 divides total by the number of batches")


def test_loop_that_is_given_all_names_the_script_to_check(tmp_path: Path) -> None:
    (tmp_path / "engine.py").write_text(ENGINE)
    reason = check(ScriptProgram(path=str(tmp_path / "engine.py"))).reason
    assert "line 9 trains in train_one_epoch(), which" in reason
    assert reason.endswith(
        "check the script that is started, which is read with the files of its folder"
    )


def test_loop_whose_parts_cannot_be_traced_gets_the_lines(tmp_path: Path) -> None:
    base = "class Base:\n    def __init__(self, model, optimizer):\n"
    base += "        self.model, self.optimizer = model, optimizer\n"
    base += (
        "    def train(self, n):\n        for epoch in range(n):\n            self.once(epoch)\n"
    )
    trainer = "from .base import Base\n\n\nclass Trainer(Base):\n    def once(self, epoch):\n"
    trainer += "        self.model.train()\n        for x, y in self.batches:\n"
    trainer += "            self.optimizer.zero_grad()\n            self.model(x).backward()\n"
    trainer += "            self.optimizer.step()\n"
    main = WITH_TRAINER.replace("from fit import Fit", "from tools import Trainer")
    main = main.replace("fit = Fit(", "fit = Trainer(")
    package = {"__init__.py": "from .trainer import *\n", "base.py": base, "trainer.py": trainer}
    result = judged(tmp_path, main, {f"tools/{name}": text for name, text in package.items()})
    assert result.diff == ""
    assert result.reason.startswith("main.py: its loop is in another file: tools/trainer.py:")
    assert result.reason.endswith("paceline.connect() is the same in each file")


def test_process_group_of_the_script_is_removed_with_the_loop_in_another_file(
    tmp_path: Path,
) -> None:
    text = MAIN.replace("def main(num_epochs):\n", "def main(num_epochs):\n    INIT\n")
    text = text.replace("INIT", 'torch.distributed.init_process_group("gloo")')
    text = text.replace("    optimizer = ", "    model = DDP(model)\n    optimizer = ")
    text = text.replace(
        "from engine", "from torch.nn.parallel import DistributedDataParallel as DDP\nfrom engine"
    )
    result = judged(tmp_path, text, {"engine.py": ENGINE})
    assert result.reason == ""
    assert '-    torch.distributed.init_process_group("gloo")\n' in result.diff
    assert "+++ engine.py" in result.diff


def test_script_without_any_loop_is_refused(tmp_path: Path) -> None:
    result = judged(tmp_path, MAIN, {"engine.py": ENGINE.replace("optimizer.step()", "pass")})
    assert "no optimizer.step() in a loop was found" in result.reason


def test_only_files_below_the_scripts_folder_are_followed(tmp_path: Path) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    (tmp_path / "engine.py").write_text(ENGINE)
    (folder / "main.py").write_text(MAIN)
    assert list(files_with_loop(folder / "main.py", MAIN)) == []
    (folder / "engine").symlink_to(tmp_path)
    assert list(files_with_loop(folder / "main.py", MAIN)) == []


def test_line_endings_of_the_other_file_are_kept(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(MAIN + "from ......... import nothing\n")
    (tmp_path / "engine.py").write_bytes(ENGINE.replace("\n", "\r\n").encode())
    with contextlib.chdir(tmp_path):
        diff = check(ScriptProgram(path="main.py")).diff
    assert "-        loss.backward()\r\n" in diff
    subprocess.run(["patch", "-p0", "--binary"], input=diff.encode(), check=True, cwd=tmp_path)
    assert b"with pace.step():" in (tmp_path / "engine.py").read_bytes()


def test_joined_texts_are_split_again() -> None:
    texts = ["a = 1", "b = 2\n"]
    assert split(join(texts, "b"), texts, "b") == texts
    assert split(join(texts[:1], ""), texts[:1], "") == texts[:1]
    with pytest.raises(CannotDerive, match="both files define f"):
        join(["def f(): pass\n", "class f: pass\n"], "b")
    assert not has_steps("step(")


def test_lines_are_told_with_their_file() -> None:
    texts, names = ["a = 1", "b = 2\n"], ["a.py", "b.py"]
    said = "a.py:1 and a.py:4, line 3, the loops of lines 3 and 4 (so do lines 1, 4) in line 1"
    expected = "a.py:1 and b.py:2, b.py:1, the loops of b.py:1 and b.py:2 (so do lines 1, b.py:2)"
    assert placed(said, names, texts) == f"{expected} in line 1"


HEAD = """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

"""
DATA = "loader = DataLoader(TensorDataset(torch.randn(64, 4), torch.randn(64, 2)), batch_size=16)\n"
OWN_OPTIMIZER = """\
import torch


class Trainer:
    def __init__(self, net, batches):
        self.net, self.batches = net, batches
        self.optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def fit(self, num_epochs):
        for epoch in range(num_epochs):
            for x, y in self.batches:
                self.optimizer.zero_grad()
                (self.net(x) - y).square().mean().backward()
                self.optimizer.step()
"""
TRAINED = HEAD + "from trainer import Trainer\n\n" + DATA + "model = nn.Linear(4, 2)\nUSE\n"


@pytest.mark.parametrize(
    "use",
    [
        "Trainer(model, loader).fit(3)",
        "trainer = Trainer(model, loader)\ntrainer.fit(3)",
    ],
)
def test_names_of_the_script_are_not_used_in_the_other_file(use: str, tmp_path: Path) -> None:
    text = TRAINED.replace("USE", f'{use}\ntorch.save(model.state_dict(), "end.pt")')
    result = judged(tmp_path, text, {"trainer.py": OWN_OPTIMIZER})
    assert result.reason == ""
    assert "self.net, self.optimizer, self.batches = pace.prepare(self.net" in result.diff
    subprocess.run(["patch", "-p0"], input=result.diff, text=True, check=True, cwd=tmp_path)
    with contextlib.chdir(tmp_path):  # where it saves its weights
        run = run_script(tmp_path / "main.py", tmp_path / "two", workers=2)
    assert {fact.ticket.member for fact in run.pushes} == {0, 1}


def test_loader_that_an_object_holds_is_prepared_there(tmp_path: Path) -> None:
    trainer = OWN_OPTIMIZER.replace("fit(self, num_epochs)", "fit(self, epoch)")
    trainer = trainer.replace("        for epoch in range(num_epochs):\n", "")
    head, _, loop = trainer.partition("            for x, y")
    loop = "".join(row[4:] for row in f"            for x, y{loop}".splitlines(keepends=True))
    use = "trainer = Trainer(model, loader)\nfor epoch in range(3):\n    trainer.fit(epoch)"
    result = judged(tmp_path, TRAINED.replace("USE", use), {"trainer.py": head + loop})
    assert ", trainer.optimizer, trainer.batches = pace.prepare(" in result.diff
    subprocess.run(["patch", "-p0"], input=result.diff, text=True, check=True, cwd=tmp_path)
    run = run_script(tmp_path / "main.py", tmp_path / "two", workers=2)
    assert {fact.ticket.member for fact in run.pushes} == {0, 1}
    assert [set(epoch.values()) for epoch in run.used()] == [{1}] * 3


def test_function_that_a_loop_of_the_script_calls_is_not_changed_alone(tmp_path: Path) -> None:
    fit = HEAD + "\ndef fit(seed):\n    " + DATA + "    model = nn.Linear(4, 2)\n"
    fit += "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    fit += "    for epoch in range(2):\n        for x, y in loader:\n"
    fit += "            optimizer.zero_grad()\n            model(x).mean().backward()\n"
    fit += "            optimizer.step()\n    return model\n"
    for text in (
        "from fit import fit\n\nfor seed in range(3):\n    fit(seed)\n",
        "import fit\n\nfor seed in range(3):\n    fit.fit(seed)\n",
    ):
        result = judged(tmp_path, text, {"fit.py": fit})
        assert result.diff == ""
        assert "calls the function that trains repeatedly" in result.reason


def test_function_of_an_imported_module_is_followed(tmp_path: Path) -> None:
    text = MAIN.replace("from engine import evaluate, train_one_epoch", "import engine")
    text = text.replace("train_one_epoch(", "engine.train_one_epoch(")
    text = text.replace("evaluate(model", "engine.evaluate(model")
    result = judged(tmp_path, text, {"engine.py": ENGINE})
    assert "in pace.epochs(num_epochs)" in result.diff
    assert "+++ engine.py" in result.diff


def test_file_is_found_by_what_is_imported_from_it(tmp_path: Path) -> None:
    text = MAIN.replace(
        "from engine import evaluate, train_one_epoch",
        "from first import evaluate\nfrom second import train_one_epoch",
    )
    result = judged(tmp_path, text, {"first.py": ENGINE, "second.py": ENGINE})
    assert "+++ second.py" in result.diff
    assert "+++ first.py" not in result.diff
    both = text.replace("second import train", "second import evaluate as e, train").replace(
        "        scheduler", "        first.train_one_epoch(model, None, loader, optimizer)\n"
        "        scheduler"
    )  # fmt: skip
    result = judged(tmp_path, f"import first\n{both}", {})
    assert result.diff == ""
    assert "first.py and second.py all train" in result.reason


def test_file_that_writes_while_it_is_imported_is_refused(tmp_path: Path) -> None:
    result = judged(tmp_path, MAIN, {"engine.py": f"import os\nos.makedirs('out')\n{ENGINE[36:]}"})
    assert result.diff == ""
    assert "it writes or downloads while it is imported" in result.reason


def test_process_group_of_a_third_file_is_noted_and_gets_no_ranks(tmp_path: Path) -> None:
    helper = "import torch.distributed as dist\n\n\ndef begin():\n    dist.init_process_group()\n"
    text = MAIN.replace("from engine", "import helper\nfrom engine")
    result = judged(tmp_path, text, {"engine.py": ENGINE, "helper.py": helper})
    assert any("helper.py:5 makes a torch.distributed process group" in n for n in result.notes)
    assert check_script(ScriptProgram(path=str(tmp_path / "main.py"))).has_group


def test_label_of_the_other_file_is_relative_to_the_scripts_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project, here = tmp_path / "project", tmp_path / "here"
    (project / "tools").mkdir(parents=True)
    here.mkdir()
    (project / "main.py").write_text(MAIN.replace("from engine", "from tools.engine"))
    (project / "tools" / "engine.py").write_text(ENGINE)
    (here / "run.py").symlink_to(project / "main.py")
    for folder, path in ((here, "../project/main.py"), (here, "run.py"), (tmp_path, "here/run.py")):
        monkeypatch.chdir(folder)
        diff = check(ScriptProgram(path=path)).diff
        labels = [row[4:] for row in diff.splitlines() if row.startswith("+++ ")]
        base = folder if (folder / labels[0]).is_file() else project
        assert all((base / label).is_file() for label in labels), labels
        assert [(base / label).name for label in labels] == ["main.py", "engine.py"]


def test_scheduler_of_another_kind_is_not_prepared() -> None:
    text = DATA.join([HEAD, "from kit import pipe\nmodel = nn.Linear(4, 2)\n"])
    text += "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\nfor x, y in loader:\n"
    text += "    optimizer.zero_grad()\n    model(x).mean().backward()\n    optimizer.step()\n"
    for rest in (
        "x = pipe.scheduler.step(model(x), 1, x).prev_sample\n",
        "pipe.scheduler.step()\n",
        "noise_scheduler.step()\n",
    ):
        assert "pace.prepare(model, optimizer, loader)\n" in port(text + rest)
    assert "optimizer, loader, scheduler)\n" in port(text + "scheduler.step()\n")
