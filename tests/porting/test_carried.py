"""Scripts of the usual forms compute the same with their diff applied, and train in parallel."""

import contextlib
import io
import re
import runpy
import subprocess
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

import paceline
from paceline.context import Context
from paceline.porting.around_step import step_hooks
from paceline.porting.check import CheckResult, check, judge
from paceline.porting.parts import Parts
from paceline.porting.porting import check_script
from paceline.porting.reading import Source
from paceline.porting.rewrite import port
from paceline.porting.tree import SourceTree
from paceline.program import ScriptProgram
from paceline.replica.seeding import kept_random_state, seed_all
from paceline.script import worker
from runs import Run, run_script

HERE = Path(__file__).parent
PLAIN = sorted(one.stem for one in (HERE / "plain").glob("*.py"))
ACCELERATED = sorted(one.stem for one in (HERE / "accelerate").glob("*.py"))
SEEDED = {
    "episodes": (
        "        for _ in range(2)",
        "        seed(episode - 1)\n        for _ in range(2)",
    ),
    "fresh_generator": ("    model.train()", "    seed(i)\n    model.train()"),
    "counted_draws": ("    state, goal = play()", "    seed(i - 1)\n    state, goal = play()"),
    "drawn_batches": ("    lr = get_lr(iter_num)", "    seed(iter_num)\n    lr = get_lr(iter_num)"),
    "until_good": (
        "    while True:",
        "    from itertools import count\n    for it in count():\n        seed(it)",
    ),
}
"""Loops that draw their batches: the draws follow from the number of an iteration."""
AHEAD = (
    ('X, Y = get_batch("train")  # the first one\n', ""),
    ('        X, Y = get_batch("train")\n        loss.backward()', "        loss.backward()"),
    ("        loss = nn.f", '        X, Y = get_batch("train")\n        loss = nn.f'),
)
"""A batch drawn one iteration ahead is drawn in its own."""
ADDED = {
    "accumulated": 8,
    "by_index": 7,
    "by_iterator": 8,
    "clamped_critic": 12,
    "closure": 7,
    "counted_draws": 7,
    "cycled": 10,
    "drawn_batches": 11,
    "endless_class": 7,
    "episodes": 9,
    "fresh_generator": 7,
    "full_batch": 7,
    "functions": 6,
    "globals_in_functions": 7,
    "kept_number": 10,
    "loader_inside": 6,
    "module_level": 6,
    "next_batch": 7,
    "own_closure": 6,
    "own_optimizer": 8,
    "streamed": 6,
    "trainer_class": 8,
    "turns_of_two": 7,
    "two_modules": 11,
    "two_optimizers": 6,
    "until_good": 6,
    "windows": 7,
    "wrapped_loader": 6,
}
"""New or changed lines, including ``if pace.is_main`` and a loader's ``.plain``."""
SAME_IN_PARTS = (
    "accumulated", "by_iterator", "clamped_critic", "closure", "cycled", "full_batch",
    "kept_number", "module_level", "next_batch", "own_closure", "own_optimizer", "streamed",
    "trainer_class", "turns_of_two", "two_modules", "two_optimizers", "windows", "wrapped_loader",
)  # fmt: skip
"""Neither dropout nor batch norm nor draws: two workers compute the same as one."""


def ported(path: Path, folder: Path) -> tuple[Path, CheckResult]:
    """A copy of a script in ``folder`` with its diff applied by patch."""
    copy = folder / path.name
    copy.write_bytes(path.read_bytes())
    with contextlib.chdir(folder):
        verdict = check(ScriptProgram(path=path.name))
        assert verdict.reason == ""
        subprocess.run(["patch", "-p0"], input=verdict.diff, text=True, check=True)
    return copy, verdict


def run_alone(script: Path, folder: Path) -> dict[str, Tensor]:
    """The result of a script under plain ``python``."""
    folder.mkdir(exist_ok=True)
    worker.start_context(None, Context())  # type: ignore[arg-type]

    def seed(number: int) -> None:
        seed_all(paceline.step_seed(0, 0, number))

    with kept_random_state(), contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
        torch.manual_seed(0)
        runpy.run_path(str(script), {"seed": seed}, run_name="__main__")
    worker.start_context(None, Context())  # type: ignore[arg-type]
    return torch.load(folder / "end.pt")


def twin(name: str, folder: Path) -> Path:
    """The plain script; if it draws batches itself, seeded as in a run."""
    text = (HERE / "plain" / f"{name}.py").read_text()
    edits = [SEEDED[name]] if name in SEEDED else []
    for old, new in (*edits, *(AHEAD if name == "drawn_batches" else ())):
        assert old in text
        text = text.replace(old, new)
    path = folder / f"{name}_twin.py"
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", PLAIN)
def test_ported_plain_script_computes_the_same(name: str, tmp_path: Path) -> None:
    script, verdict = ported(HERE / "plain" / f"{name}.py", tmp_path)
    assert verdict.added == ADDED[name]
    actual, expected = (
        run_alone(script, tmp_path / "new"),
        run_alone(twin(name, tmp_path), tmp_path / "old"),
    )
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[key], expected[key]) for key in expected)


@pytest.mark.parametrize("name", ACCELERATED)
def test_ported_accelerate_script_computes_the_same(name: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    path = HERE / "accelerate" / f"{name}.py"
    script, _ = ported(path, tmp_path)
    actual, expected = run_alone(script, tmp_path / "new"), run_alone(path, tmp_path / "old")
    assert all(torch.equal(actual[key], expected[key]) for key in expected)


@pytest.mark.parametrize("name", [*PLAIN, *(f"../accelerate/{one}" for one in ACCELERATED)])
def test_ported_script_trains_with_two_workers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script, _ = ported(HERE / "plain" / f"{name}.py", tmp_path)
    run: Run = run_script(script, tmp_path, workers=2)
    assert {fact.ticket.member for fact in run.pushes} == {0, 1}
    has_end = "pace.updates()" not in script.read_text()
    assert run.summary.ended == ("finished" if has_end else "the script asked for it")
    assert {count for epoch in run.used() for count in epoch.values()} == {1}
    assert all(one.isfinite().all() for one in torch.load("end.pt").values())


def test_cancelled_iteration_leaves_nothing_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "from" / "episodes.py"
    path.parent.mkdir()
    text = (HERE / "plain" / "episodes.py").read_text()
    path.write_text(text.replace("running < 0.3", "episode >= 40"))
    script, verdict = ported(path, tmp_path)
    assert any("clears losses at the end of an iteration" in note for note in verdict.notes)
    run = run_script(script, tmp_path, workers=2, protocol="k-sync:1", delay=("exp:20ms",))
    assert run.summary.superseded.count


@pytest.mark.parametrize("name", SAME_IN_PARTS)
def test_two_workers_compute_the_same_as_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (HERE / "plain" / f"{name}.py").read_text().replace("shuffle=True", "shuffle=False")
    plain = tmp_path / "plain.py"
    plain.write_text(text)
    expected = run_alone(plain, tmp_path / "old")
    (tmp_path / "from").mkdir()
    path = tmp_path / "from" / f"{name}.py"
    path.write_text(text)
    script, _ = ported(path, tmp_path)
    run_script(script, tmp_path, workers=2)
    actual = torch.load("end.pt")
    for key, value in expected.items():
        torch.testing.assert_close(actual[key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("is_asked", [True, False])
def test_scheduler_that_is_not_always_made_is_prepared(
    is_asked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (HERE / "plain" / "module_level.py").read_text()
    made = re.search(r"scheduler = (.*)\n", text)
    assert made is not None
    text = text.replace(made[1], f"{made[1]} if {is_asked} else None")
    plain = tmp_path / "plain.py"
    plain.write_text(text.replace("scheduler.step()", "if scheduler: scheduler.step()"))
    expected = run_alone(plain, tmp_path / "old")
    (tmp_path / "new").mkdir()
    script, verdict = ported(plain, tmp_path / "new")
    assert "pace.prepare(model, optimizer, train_loader, scheduler)" in verdict.diff
    actual = run_alone(script, tmp_path / "new")
    assert all(torch.equal(actual[key], expected[key]) for key in expected)
    run_script(script, tmp_path, workers=2)


def test_folders_are_made_by_one_of_two_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (HERE / "plain" / "module_level.py").read_text()
    tested = "if not os.path.isdir('b'):\n    print('b')\n    os.mkdir('b')\n"
    (tmp_path / "from").mkdir()
    path = tmp_path / "from" / "folders.py"
    made = f"os.makedirs('a')\n{tested}torch.manual_seed("
    path.write_text(f"import os\n{text.replace('torch.manual_seed(', made, 1)}")
    script, _ = ported(path, tmp_path)
    run = run_script(script, tmp_path, workers=2)
    assert run.summary.ended == "finished"
    assert (tmp_path / "a").is_dir()
    assert (tmp_path / "b").is_dir()


def test_ported_script_needs_no_change(tmp_path: Path) -> None:
    script, _ = ported(HERE / "plain" / "functions.py", tmp_path)
    verdict = check(ScriptProgram(path=str(script)))
    assert (verdict.diff, verdict.reason) == ("", "")
    assert verdict.to_json()["verdict"] == "nothing to add"


def test_check_runs_no_line_and_writes_no_file(tmp_path: Path) -> None:
    text = (
        'import torch\nopen("made", "w").close()\n' + (HERE / "plain/module_level.py").read_text()
    )
    (tmp_path / "train.py").write_text(text)
    with contextlib.chdir(tmp_path):
        assert check(ScriptProgram(path="train.py")).diff
        assert [path.name for path in Path().iterdir()] == ["train.py"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("\n", "\r\n"),
        ("    ", "\t"),
        ('"end.pt")\n', '"end.pt")'),
        ("epochs", "Größe"),
        ((HERE / "plain" / "functions.py").read_text().partition("import torch\n")[0], "\ufeff"),
    ],
)
def test_diff_applies_with_any_line_endings(old: str, new: str, tmp_path: Path) -> None:
    text = (HERE / "plain" / "functions.py").read_text().replace(old, new)
    path = tmp_path / "train.py"
    path.write_bytes(text.encode())
    with contextlib.chdir(tmp_path):
        verdict = check(ScriptProgram(path="train.py"))
        subprocess.run(["git", "apply"], input=verdict.diff.encode(), check=True)
    after = path.read_bytes().decode()
    assert "with pace.step():" in after
    check_script(ScriptProgram(path=str(path)))
    assert check(ScriptProgram(path=str(path))).diff == ""
    assert after.startswith("\ufeff") is new.startswith("\ufeff")
    assert after.count("\r\n") in (0, after.count("\n"))


def test_diff_names_the_file_as_patch_expects(tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    script = tmp_path / "jobs" / "train.py"
    script.write_bytes((HERE / "plain" / "functions.py").read_bytes())
    for place, label in ((tmp_path, "jobs/train.py"), (script.parent, "train.py")):
        with contextlib.chdir(place):
            assert check(ScriptProgram(path=str(script))).diff.startswith(f"--- {label}\n")
    with contextlib.chdir("/"):
        relative = str(script).removeprefix("/")
        assert check(ScriptProgram(path=relative)).diff.startswith(f"--- {relative}\n")
    (tmp_path / "here").mkdir()
    with contextlib.chdir(tmp_path / "here"):
        assert check(ScriptProgram(path="../jobs/train.py")).diff.startswith("--- train.py\n")


def notes_of_sums(text: str) -> list[str]:
    """The notes on losses that are sums."""
    return [note for note in judge(Source(text), "train.py").notes if "sums the loss" in note]


def test_loss_summed_over_a_batch_is_noted() -> None:
    text = (HERE / "plain" / "functions.py").read_text()
    assert notes_of_sums(text) == []  # the sum in test() trains nothing
    summed = text.replace("nll_loss(output, target)", 'nll_loss(output, target, reduction="sum")')
    (note,) = notes_of_sums(summed)
    assert note.startswith("train.py:30 sums the loss over a batch")


@pytest.mark.parametrize(
    ("loss", "is_sum"),
    [
        ("F.nll_loss(output, target, size_average=False)", True),
        ("((output - target) ** 2).sum()", True),
        ("0.5 * torch.sum(output) + F.nll_loss(output, target)", True),
        ("-(output * target).sum()", True),
        ("output.sum(1).mean()", False),
        ("torch.sum(output, 1).mean()", False),
        ("output.sum() / len(output)", False),
        ("output.sum() / output.shape[0]", False),
        ('F.nll_loss(output, target, reduction="sum") / output.size(0)', False),
        ('F.nll_loss(output, target, reduction="sum") / output.size(1)', True),
        ('F.nll_loss(output, target, reduction="sum") / output.shape[1]', True),
        ("output.sum() / output.size(1)", True),
        ("output.sum() / (output.size(1) * output.size(0))", False),
        ('F.nll_loss(output, target, reduction="sum") / len(loader.dataset)', True),
        ("F.nll_loss(output, target) * (output.sum() / len(output))", False),
        ("F.nll_loss(output, target) / 4", False),
        ("output.sum() / args.batch_size", True),
        ("output.sum() / 64", True),
        ("F.nll_loss(output, target) * (output.sum() / 2)", True),
        ('F.nll_loss(output, target, reduction="sum") / len(output)', False),
        ('(F.nll_loss(output, target, reduction="sum") + output.sum()) / len(output)', False),
        ('F.nll_loss(output, target, reduction="sum") / args.batch_size', True),
        ('F.nll_loss(output, target, reduction="sum") / args.accumulate', True),
        ('F.nll_loss(output, target, reduction="sum") + output.sum() / len(output)', True),
    ],
)
def test_loss_sums_are_recognized(loss: str, is_sum: bool) -> None:
    text = (HERE / "plain" / "functions.py").read_text()
    changed = text.replace("F.nll_loss(output, target)", loss, 1)
    assert changed != text
    notes = judge(Source(changed), "train.py").notes
    assert any("sums the loss over a batch" in note for note in notes) is is_sum


def test_sum_divided_later_by_its_samples_counts_as_a_mean() -> None:
    text = (HERE / "plain" / "functions.py").read_text()
    line = "        loss = F.nll_loss(output, target)\n"
    assert line in text
    for divisor, is_noted in (("len(output)", False), ("n", False), ("args.batch_size", True)):
        for divided in (f"loss = loss / {divisor}", f"loss /= {divisor}"):
            for summed in ("output.sum()", 'F.nll_loss(output, target, reduction="sum")'):
                lines = f"n = len(data)\n        loss = {summed}\n        {divided}\n"
                notes = notes_of_sums(text.replace(line, f"        {lines}"))
                assert bool(notes) is is_noted


def test_asked_sum_divided_by_accumulated_steps_is_noted() -> None:
    text = (HERE / "plain" / "functions.py").read_text()
    line = "        loss = F.nll_loss(output, target)\n"
    lines = (
        'accum = args.steps\n        loss = F.nll_loss(output, target, reduction="sum") / accum\n'
    )
    assert notes_of_sums(text.replace(line, f"        {lines}"))


def test_loss_of_many_lines_is_followed_once() -> None:
    """Each line may be the one before which any other was computed."""
    text = (HERE / "plain" / "functions.py").read_text()
    line = "        loss = F.nll_loss(output, target)\n"
    lines = "".join(f"        loss = loss + {number} * output.mean()\n" for number in range(12))
    start_s = time.monotonic()
    notes_of_sums(text.replace(line, f"{line}{lines}        loss = loss / args.steps\n"))
    assert time.monotonic() - start_s < 30.0


def test_sum_over_a_drawn_batch_is_not_noted() -> None:
    script = """\
import torch
x, y = torch.ones(8, 3), torch.ones(8, 1)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(500):
    loss = ((model(x) - y) ** 2).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
    (note,) = judge(Source(script), "train.py").notes
    assert note.startswith("train.py:5 random numbers are seeded")
    assert note.endswith("workers compute the same, and a DataLoader shares them")


def test_ddp_script_gets_no_note_about_sums() -> None:
    text = (HERE / "ddp" / "module_level.py").read_text()
    loss = re.search(r"loss = (.*)\n", text)
    assert loss is not None
    summed = text.replace(loss[1], f"({loss[1]}).sum()")
    verdict = judge(Source(summed), "train.py")
    assert 'batch="per-worker"' in verdict.diff
    assert not any("sums the loss" in note for note in verdict.notes)


def test_mean_over_tokens_is_noted() -> None:
    text = (HERE / "plain" / "functions.py").read_text()
    masked = text.replace("nll_loss(output, target)", "nll_loss(output, target, ignore_index=-1)")
    assert masked != text
    assert any(
        "targets that ignore_index leaves" in note for note in judge(Source(masked), "a").notes
    )


def test_learning_rate_set_by_hand_is_noted() -> None:
    text = (HERE / "plain" / "drawn_batches.py").read_text()
    (note, _) = judge(Source(text), "train.py").notes
    assert note.startswith("train.py:54 sets a learning rate by hand for each step")


def test_differences_to_accelerate_are_noted() -> None:
    text = (HERE / "accelerate" / "functions.py").read_text()
    notes = " ".join(judge(Source(text), "train.py").notes)
    assert 'batch="per-worker"' in notes
    assert "asks for mixed_precision=args.mixed_precision, which is not carried over" in notes


TWO_LOADERS = """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=8)
other = DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=8)
for epoch in range(2):
    it = iter(other)
    for (x,) in loader:
        (u,) = next(it)
        optimizer.zero_grad()
        (model(x) - model(u)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        nn.utils.clip_grad_norm_(model.parameters(), 2.0)
"""


def test_unprepared_second_loader_is_named() -> None:
    (note,) = judge(Source(TWO_LOADERS), "train.py").notes
    assert note.startswith("train.py:12 takes from other by next(), and these lines do not prepare")
    assert note.endswith("other = pace.prepare(other)")


def test_checkpoint_is_copied_by_the_worker_that_wrote_it() -> None:
    """Another worker would copy a missing or incomplete file."""
    saved = TWO_LOADERS.replace("import torch\n", "import shutil\n\nimport torch\n", 1)
    saved += (
        "    torch.save(model.state_dict(), 'last.pt')\n"
        "    if epoch == 1:\n"
        "        shutil.copyfile('last.pt', 'best.pt')\n"
    )
    diff = judge(Source(saved), "train.py").diff
    assert (
        "+    if pace.is_main:\n"
        "+        torch.save(model.state_dict(), 'last.pt')\n"
        "     if epoch == 1:\n"
        "-        shutil.copyfile('last.pt', 'best.pt')\n"
        "+        if pace.is_main:\n"
        "+            shutil.copyfile('last.pt', 'best.pt')\n"
    ) in diff


def test_clipping_after_the_step_stays_as_torch() -> None:
    diff = judge(Source(TWO_LOADERS), "train.py").diff
    assert "pace.clip_grad_norm_(model.parameters(), 1.0)" in diff
    assert "pace.clip_grad_norm_(model.parameters(), 2.0)" not in diff
    turned = TWO_LOADERS.replace("        nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n", "")
    turned = turned.replace("        optimizer.zero_grad()\n", "        optimizer.step()\n")
    turned = turned.replace(".backward()\n        optimizer.step()\n", ".backward()\n")
    assert "pace.clip_grad_norm_(model.parameters(), 2.0)" in judge(Source(turned), "t.py").diff


CLAMPED = """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=8)
limit = 1.0
for epoch in range(2):
    for i, (x,) in enumerate(loader):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        for p in model.parameters():
            p.data.clamp_(-limit, limit)
"""


@pytest.mark.parametrize(
    ("old", "new", "is_moved"),
    [
        ("", "", True),
        ("-limit, limit", "-limit, limit / (1 + epoch)", False),
        ("-limit, limit", "-limit, float(x.max())", False),
        (
            "        optimizer.step()",
            "        limit = limit * 0.9\n        optimizer.step()",
            False,
        ),
        (
            "            p.data.clamp_(-limit, limit)",
            "            print(p.data.clamp_(-1, 1))",
            False,
        ),
        ("p.data.clamp_", "p.grad.clamp_", False),
    ],
)
def test_weight_changes_after_a_step_move_into_a_step_hook(
    old: str, new: str, *, is_moved: bool
) -> None:
    diff = judge(Source(CLAMPED.replace(old, new, 1)), "train.py").diff
    assert ("register_step_post_hook" in diff) == is_moved


def test_step_hook_keeps_the_lines_and_their_comment() -> None:
    commented = CLAMPED.replace("        for p", "        # bounded\n        for p")
    ((lines, text),) = step_hooks(Parts(SourceTree(commented)))
    assert len(lines) == 1
    assert text == (
        "def behind_step(*_):\n    # bounded\n    for p in model.parameters():\n"
        "        p.data.clamp_(-limit, limit)\n",
        "optimizer.register_step_post_hook(behind_step)",
    )


IMPORTS = (
    "import torch\nfrom torch import nn\nfrom torch.utils.data import DataLoader, TensorDataset\n"
)


@pytest.mark.parametrize("is_under_try", [False, True])
def test_future_import_stays_first(*, is_under_try: bool) -> None:
    imports = IMPORTS
    if is_under_try:
        rows = "".join(f"    {row}\n" for row in IMPORTS.splitlines())
        imports = f"try:\n{rows}except ImportError:\n    raise\n"
    text = CLAMPED.replace(IMPORTS, f"from __future__ import annotations\n\n{imports}", 1)
    assert text != CLAMPED
    compile(port(text), "train.py", "exec")
