"""Code that looks like a ported pattern but is not: the diff stays correct."""

from textwrap import dedent, indent

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
    """The lines of the ported script."""
    result = judged(text)
    assert not result.reason
    return [line[1:] for line in result.diff.splitlines()[2:] if line[0] in " +"]


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
def test_batch_used_outside_its_iteration_stays(first: str, last: str) -> None:
    lines = lines_of(f"{MODEL}{first}for it in range(100):\n{TURN}{last}")
    assert sum("x = draw()" in line for line in lines) == 2


def test_batch_drawn_one_iteration_ahead_moves_into_its_own() -> None:
    """A local variable of a function may have the same name."""
    text = f"{MODEL}x = draw()\ndef draw():\n    x = torch.randn(2, 4)\n    return x\n"
    lines = lines_of(f"{text}for it in range(100):\n{TURN}    x = draw()\n")
    assert [line for line in lines if "x = draw()" in line] == ["        x = draw()"]


TRAINED = f"""\
{MODEL}loader = DataLoader(data, batch_size=8)
def train():
    for x in loader:
{indent(TURN, "    ")}    return 0.0
"""


@pytest.mark.parametrize(
    "body",
    [
        "    for epoch in range(3):\n        print(train(), file=log)\n",
        "    log.write(str(train()))\n",
    ],
)
def test_file_open_around_training_is_not_guarded(body: str) -> None:
    loop = f"with open('log', 'w') as log:\n{body}"
    if "epoch" not in body:
        loop = f"for epoch in range(3):\n{indent(loop, '    ')}"
    result = judged(f"{TRAINED}{loop}")
    assert "pace.prepare(" in result.diff
    assert "is_main" not in result.diff
    assert any("on the same files" in note for note in result.notes)


@pytest.mark.parametrize(
    ("change", "is_written_by_one"),
    [
        ("seen.append(1)", False),
        ("best += 1", False),
        ("(best := 1)", False),
        ("log.flush()", True),
    ],
)
def test_state_used_by_all_workers_is_not_made_by_one(change: str, is_written_by_one: bool) -> None:
    end = f"    with open('log', 'a') as log:\n        {change}\n        log.write('epoch')\n"
    result = judged(f"{TRAINED}for epoch in range(3):\n    train()\n{end}")
    assert ("is_main" in result.diff) is is_written_by_one
    assert bool(result.notes) is not is_written_by_one


ACCELERATED = """\
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

accelerator = Accelerator()
net = nn.Linear(4, 2)
optim = torch.optim.SGD(net.parameters(), lr=0.1)
train_loader = DataLoader(data, batch_size=8)
eval_loader = DataLoader(data, batch_size=8)
model, optimizer, train_dl, eval_dl = accelerator.prepare(net, optim, train_loader, eval_loader)
for epoch in range(3):
    for x in train_dl:
        accelerator.backward(model(x).sum())
        optimizer.step()
        optimizer.zero_grad()
    for x in eval_dl:
        print(model(x))
"""


def test_second_loader_of_accelerate_keeps_its_new_name() -> None:
    lines = lines_of(ACCELERATED)
    kept = "accelerator.prepare(net.to(accelerator.device), optim, train_loader)"
    at = lines.index(f"model, optimizer, train_dl = {kept}")
    assert lines[at + 1] == "eval_dl = eval_loader"
    assert "    for x in eval_dl:" in lines


@pytest.mark.parametrize("verb", ["unwrap_model(model=model)", "get_state_dict(model=model)"])
def test_accelerate_call_with_model_keyword_is_ported(verb: str) -> None:
    lines = lines_of(f"{ACCELERATED}torch.save(accelerator.{verb}, 'model.pt')\n")
    end = ".state_dict()" if "state" in verb else ""
    assert lines[-1].strip() == f"torch.save(model{end}, 'model.pt')"


TAKEN = """\
it = iter(train_loader)
step = 0
while step < 9:
    try:
        x = next(it)
    except StopIteration:
        it = iter(train_loader)
        x = next(it)
    with accelerator.accumulate(model):
        accelerator.backward(model(x).sum())
        optimizer.step()
        optimizer.zero_grad()
    step += 1
"""


def test_accumulating_batches_taken_by_next_is_refused() -> None:
    head = ACCELERATED[: ACCELERATED.index("for epoch")].replace("train_dl", "train_loader")
    head = head.replace("Accelerator()", "Accelerator(gradient_accumulation_steps=2)")
    why = judged(head + TAKEN).reason
    assert "takes its batches by hand under accelerator.accumulate" in why
    assert "write for batch in train_loader" in why


@pytest.mark.parametrize(
    ("numbers", "total"),
    [
        ("start, steps or 20", "(steps or 20) - start"),
        ("1, 10 if short else n + 1", "(10 if short else n + 1) - 1"),
        ("1, n + 1", "n"),
        ("1, k * (n + 1)", "k * (n + 1) - 1"),
        ("1, k << n + 1", "(k << n + 1) - 1"),
        ("a + 1, n - a + 1", "n - a + 1 - (a + 1)"),
    ],
)
def test_all_iterations_of_a_range_are_counted(numbers: str, total: str) -> None:
    lines = lines_of(f"{MODEL}for it in range({numbers}):\n{TURN}")
    assert f"for it in pace.updates({total}):" in lines


@pytest.mark.parametrize("turn", [TURN, "    learn()\n"])
def test_continue_by_iteration_number_before_the_step_is_refused(turn: str) -> None:
    function = f"def learn():\n{TURN}\n" if "learn" in turn else ""
    text = f"{MODEL}{function}for it in range(100):\n"
    why = judged(f"{text}    if (it + 1) % 4:\n        continue\n{turn}").reason
    assert "steps in some iterations only, but pace.updates(n) counts updates" in why
    assert not judged(f"{text}{turn}    if (it + 1) % 4:\n        continue\n").reason


def test_other_continue_before_the_step_is_noted() -> None:
    end = "    if len(seen) < 9:\n        continue\n"
    message = "train.py:9 goes on to the next iteration without a step"
    for turn, is_noted in ((end + TURN, True), (TURN + end, False)):
        result = judged(f"{MODEL}for it in range(100):\n{turn}")
        assert not result.reason
        assert any(note.startswith(message) for note in result.notes) is is_noted


@pytest.mark.parametrize(
    ("numbers", "ported"),
    [
        ("reversed(range(3))", "pace.epochs(list(reversed(range(3))))"),
        ("tqdm(sorted(range(3), key=f))", "tqdm(pace.epochs(sorted(range(3), key=f)))"),
        ("list(range(3))", "pace.epochs(list(range(3)))"),
        ("tqdm(range(3))", "tqdm(pace.epochs(3))"),
        ("enumerate(range(1, 3))", "enumerate(pace.epochs(range(1, 3)))"),
    ],
)
def test_epochs_keep_their_values(numbers: str, ported: str) -> None:
    lines = lines_of(f"{TRAINED}for epoch in {numbers}:\n    train()\n")
    assert f"for epoch in {ported}:" in lines


@pytest.mark.parametrize(
    ("line", "ported"),
    [
        ("gpu = 'cuda:0'", "gpu = str(pace.device)"),
        ("gpu = 'cuda:1' if found() else 'cpu'", "gpu = str(pace.device)"),
        ("gpu = 'cuda:0' if found() else 'mps' if mac else 'cpu'", "gpu = str(pace.device)"),
        ("gpu = torch.device('cuda:0' if found() else 'cpu')", "gpu = pace.device"),
        ("gpu = torch.device('xpu:0') if found() else torch.device('cpu')", "gpu = pace.device"),
        ("size = 256 if gpu == 'cuda:0' else 64", "size = 256 if gpu == 'cuda:0' else 64"),
        (
            "net = net.to('cuda:0') if found() else net",
            "net = net.to(pace.device) if found() else net",
        ),
        ("text = \"trained on 'cuda:0'\"", "text = \"trained on 'cuda:0'\""),
        (
            "gpu = args.gpu if args.gpu else 'cuda:0'",
            "gpu = args.gpu if args.gpu else str(pace.device)",
        ),
    ],
)
def test_only_a_numbered_device_becomes_the_workers(line: str, ported: str) -> None:
    assert ported in lines_of(f"{TRAINED}{line}\nfor epoch in range(3):\n    train()\n")


SAVED = f"{TRAINED}for epoch in range(3):\n    train()\n    torch.save(model.state_dict(), PATH)\n"


@pytest.mark.parametrize(
    ("rest", "is_once"),
    [
        ("model.load_state_dict(torch.load(PATH))\n", True),
        ("state = torch.load(PATH, weights_only=True)\n", True),
        ("state = torch.load(OTHER)\n", False),
        ("state = torch.load('best.pt')\n", True),
        ("if rank == 0:\n    state = torch.load(PATH)\n", False),
        ("for _ in range(2):\n    state = torch.load(PATH)\n", False),
    ],
)
def test_file_written_by_one_worker_is_read_after_it_is_written(rest: str, is_once: bool) -> None:
    """The others would find none, or a part of it: `pace.once` lets the writer go first."""
    found = lines_of(f"{SAVED}{rest}")
    assert found[found.index("    if pace.is_main:") + 1].endswith("PATH)")
    assert ("with pace.once():" in found) is is_once


@pytest.mark.parametrize(("where", "is_once"), [("", True), ("state = best()\n", False)])
def test_file_read_before_training_stays_unguarded(where: str, is_once: bool) -> None:
    """What is read before it, too, may be inside such a block already."""
    reads = "def best():\n    torch.save({}, PATH)\n    return 0\n"
    reads = f"{reads}def last():\n    state = torch.load(PATH)\n    return state\n"
    text = f"{MODEL}{reads}{where.replace('best', 'last')}{SAVED.removeprefix(MODEL)}last()\n"
    assert ("    with pace.once():" in lines_of(text)) is is_once


FIRST = "with pace.once() as is_first:\n    if is_first:\n        "


@pytest.mark.parametrize(
    ("made", "ported"),
    [
        (
            "os.makedirs('out')\nos.mkdir('log')",
            f"{FIRST}os.makedirs('out')\n        os.mkdir('log')",
        ),
        (
            "if not isdir(x):\n    print(x)\n    os.mkdir(x)",
            f"{FIRST}if not isdir(x):",
        ),
        ("if not p.exists():\n    p.mkdir()", f"{FIRST}if not p.exists():"),
        ("if not isfile('out/last.pt'):\n    os.makedirs('out')", f"{FIRST}if not isfile("),
        ("if not exists(x): os.mkdir(x)", f"{FIRST}if not exists(x): os.mkdir(x)"),
        ("Path('runs').mkdir()", f"{FIRST}Path('runs').mkdir()"),
        ("if exists(x):\n    print(x)\nelse:\n    os.mkdir(x)", f"{FIRST}if exists(x):"),
        ("if new:\n    os.mkdir(x)\nelif exists(y):\n    os.mkdir(y)", f"{FIRST}if new:"),
        (
            "if not isdir(x):\n    MNIST(x, download=True)\n    n = 1",
            "with pace.once():\n    if not",
        ),
        ("def make():\n    os.mkdir(x)\nif not isdir(x):\n    make()", None),
        ("is_first = True\nos.mkdir(x)", None),
    ],
)
def test_folder_is_made_once_in_a_block_that_all_reach(made: str, ported: str | None) -> None:
    """The others may find it already, so that a block under the test is not reached by all."""
    result = judged(f"{TRAINED}{made}\nfor epoch in range(3):\n    train()\n")
    lines = [line[1:] for line in result.diff.splitlines()[2:] if line[0] in " +"]
    found = "\n".join(lines)
    assert found.count("pace.once()") == (ported is not None)
    assert ported is None or ported in found
    assert any("os.mkdir(...) runs in every worker" in n for n in result.notes) is (ported is None)


@pytest.mark.parametrize(
    ("test", "is_whole"),
    [
        ("if global_step % 1000 == 0:", False),
        ("if this_dir:", False),
        ("if not os.path.isfile(PATH):", True),
        ("if not list(folder.glob('*.pt')):", True),
        ("if global_step == 0:\n    print(0)\nelif global_step % 1000 == 0:", False),
        ("if global_step == 0:\n    print(0)\nelif not os.path.isfile(PATH):", False),
    ],
)
def test_only_an_if_that_looks_for_files_is_guarded_with_its_line(
    test: str, is_whole: bool
) -> None:
    write = f"{test}\n    torch.save(model.state_dict(), PATH)\n"
    found = lines_of(f"{TRAINED}for epoch in range(3):\n    train()\n{indent(write, '    ')}")
    place = found.index(f"    {'    ' * (not is_whole)}if pace.is_main:")
    assert ("if not" in found[place + 1]) is is_whole


def test_file_in_a_temporary_folder_is_written_by_every_worker() -> None:
    loop = "for epoch in range(3):\n    train()\n    torch.save(model.state_dict(), path)\n"
    inside = (
        f"path = os.path.join(folder, 'best.pt')\n{loop}model.load_state_dict(torch.load(path))\n"
    )
    head = "from tempfile import TemporaryDirectory\n" + TRAINED
    found = lines_of(f"{head}with TemporaryDirectory() as folder:\n{indent(inside, '    ')}")
    assert not any("pace.is_main" in one or "pace.once" in one for one in found)


BATCHES = f"""\
class Batches:
    def __init__(self, dl):
        self.dl = dl
    def __iter__(self):
        for x in BODY:
            yield x
{MODEL}MADE
for epoch in range(3):
    for x in batches:
{indent(TURN, "    ")}"""


@pytest.mark.parametrize(
    ("body", "made", "is_found"),
    [
        ("self.dl", "batches = Batches(DataLoader(data))", True),
        ("enumerate(self.dl)", "batches = Batches(DataLoader(data))", True),
        ("range(9)", "batches = Batches(DataLoader(data))", False),
        ("self.dl", "batches = DataLoader(data)\nif gpu:\n    batches = Batches(batches)", False),
    ],
)
def test_loader_inside_an_object_is_prepared(body: str, made: str, is_found: bool) -> None:
    found = judged(BATCHES.replace("BODY", body).replace("MADE", made))
    assert ("batches.dl = pace.prepare(model, optimizer, batches.dl)" in found.diff) is is_found
    assert ("and not the Batches over which the loop iterates" in found.reason) is not is_found
