"""A script for DistributedDataParallel gets a correct diff."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.errors import ConfigError
from paceline.porting.accelerate import leave_accelerate
from paceline.porting.check import check
from paceline.porting.parts import Parts
from paceline.porting.porting import advise, check_script, read
from paceline.porting.reading import Source
from paceline.porting.rewrite import port
from paceline.porting.tree import CannotDerive, SourceTree
from paceline.program import ScriptProgram

BEFORE = '''\
"""Train."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = nn.Linear(4, 2)
    model = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # größer?
    data = TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            text = """two
lines"""
            loss.backward()

            optimizer.step()
        if dist.get_rank() == 0:
            print(loss.item())
    if rank == 0:
        torch.save(model.module.state_dict(), "model.pt")
    dist.destroy_process_group()


main()
'''
AFTER = '''\
"""Train."""
import paceline
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pace = paceline.connect()


def main() -> None:
    rank = pace.worker
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # größer?
    data = TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,)))
    loader = DataLoader(data, batch_size=8, shuffle=True)
    model, optimizer, loader = pace.prepare(model, optimizer, loader, batch="per-worker")
    for epoch in pace.epochs(3):
        for inputs, targets in loader:
            with pace.step():
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(inputs), targets)
                text = """two
lines"""
                loss.backward()

                optimizer.step()
        if pace.is_main:
            print(loss.item())
    if rank == 0:
        torch.save(model.state_dict(), "model.pt")


main()
'''
SPAWNED = """\
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from mine import Net, data


def setup(rank, size):
    dist.init_process_group("nccl", rank=rank, world_size=size)


def train_one(net, batches, opt):
    for i, (x, y) in enumerate(batches):
        opt.zero_grad()
        loss = net(x).sum()
        loss.backward()
        opt.step()
        dist.all_reduce(loss)


def run(rank, size):
    setup(rank, size)
    net = DistributedDataParallel(Net().to(rank), device_ids=[rank])
    opt = torch.optim.Adam(net.parameters())
    batches = DataLoader(data, shuffle=False, sampler=DistributedSampler(data), num_workers=2)
    for epoch in range(10):
        train_one(net, batches, opt)


if __name__ == "__main__":
    mp.spawn(run, args=(2,), nprocs=2)
"""


def test_usual_ddp_script_is_ported_line_by_line() -> None:
    assert port(BEFORE) == AFTER


def test_ported_script_gets_no_advice() -> None:
    assert advise(Source(AFTER), "train.py") is None


def test_message_is_one_sentence_and_the_diff() -> None:
    hint = advise(Source(BEFORE), "train.py")
    assert hint is not None
    sentence, _, diff = hint.partition("\n\n")
    assert sentence.startswith("train.py:10 uses torch's own process group and never calls")
    assert "\n" not in sentence
    assert diff.startswith("--- train.py\n+++ train.py\n")
    assert '\n-    dist.init_process_group("gloo")\n' in diff
    assert "\n+pace = paceline.connect()\n" in diff
    assert "There" not in diff  # nothing remains


def test_loop_in_another_function_and_spawned_processes_are_followed() -> None:
    hint = advise(Source(SPAWNED), "train.py")
    assert hint is not None
    ported = port(SPAWNED)
    ast.parse(ported)
    assert "def setup(rank, size):\n    pass\n" in ported
    assert "from mine import Net, data\n\npace = paceline.connect()\n" in ported
    assert "        with pace.step():\n            opt.zero_grad()\n" in ported
    assert "    net = Net().to(pace.device)\n" in ported
    assert ported.endswith("    run(pace.worker, 2)\n")
    assert "batches = DataLoader(data, shuffle=True, num_workers=2)\n" in ported
    assert 'net, opt, batches = pace.prepare(net, opt, batches, batch="per-worker")\n' in ported
    assert "for epoch in pace.epochs(10):" in ported


def test_arguments_of_prepare_come_from_one_function() -> None:
    parts = Parts(SourceTree(SPAWNED))
    assert parts.names == ["net", "opt", "batches"]
    assert not parts.is_flagged


def test_lines_that_still_need_a_group_are_named() -> None:
    hint = advise(Source(SPAWNED), "train.py")
    assert hint is not None
    left_over = hint[hint.index("These lines") :].splitlines()[1:]
    assert [line.split(": ", 1)[1] for line in left_over] == [
        "dist.all_reduce(loss)",
    ]


def test_unfollowed_script_gets_the_lines_themselves() -> None:
    text = "import torch.distributed as dist\ndist.init_process_group()\n"
    with pytest.raises(CannotDerive):
        port(text)
    hint = advise(Source(text), "train.py")
    assert hint is not None
    assert "with pace.step():" in hint
    assert 'batch="per-worker"' in hint


@pytest.mark.parametrize(
    "text",
    [
        "print('no torch at all')\n",
        "import paceline\npace = paceline.connect()\nimport torch.distributed as d\n"
        "d.init_process_group()\n",
        "from paceline import connect\nfrom torch.nn.parallel import DistributedDataParallel\n"
        "pace = connect()\nDistributedDataParallel(model)\n",
    ],
)
def test_unrelated_scripts_pass(text: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(text)
    check_script(ScriptProgram(path=str(tmp_path / "train.py")))


ACCELERATED = """\
from accelerate import Accelerator
accelerator = Accelerator()
net, opt, batches, plan = accelerator.prepare(net, opt, batches, plan)
for epoch in range(3):
    for x, y in batches:
        opt.zero_grad()
        accelerator.backward(loss_of(net(x), y))
        opt.step()
"""


def test_accelerate_script_gets_a_diff() -> None:
    hint = advise(Source(ACCELERATED), "train.py")
    assert hint is not None
    assert hint.startswith("train.py:2 is written for Accelerate, whose workers paceline's")
    assert "\n+accelerator = paceline.connect()\n" in hint
    assert "\n+        with accelerator.step():\n" in hint


def test_unported_accelerate_script_gets_lines_with_its_names() -> None:
    hint = advise(Source(ACCELERATED.replace("opt.step()", "accelerator.reduce(1)")), "train.py")
    assert hint is not None
    assert "    net, opt, batches, plan = pace.prepare(net, opt, batches, plan)  # line 3\n" in hint
    assert "pace.backward(loss)" in hint


@pytest.mark.parametrize(
    ("text", "library"),
    [
        ("from transformers import Trainer\nTrainer(model).train()\n", "the Trainer of trans"),
        ("import deepspeed\nengine = deepspeed.initialize(model=model)\n", "DeepSpeed"),
    ],
)
def test_loop_of_another_library_is_named(text: str, library: str) -> None:
    hint = advise(Source(text), "train.py")
    assert hint is not None
    assert hint.startswith(f"train.py:2 is written for {library}")
    assert "with pace.step():" in hint


@pytest.mark.parametrize("module", ["lightning", "lightning.pytorch", "pytorch_lightning"])
def test_lightning_trainer_is_pointed_to_the_strategy(module: str) -> None:
    hint = advise(Source(f"import {module} as L\nL.Trainer().fit(model)\n"), "train.py")
    assert hint is not None
    assert hint.startswith("train.py:2 is written for Lightning, whose workers paceline's")
    assert "strategy=PacelineStrategy()" in hint


def test_lightning_trainer_with_the_strategy_needs_no_change() -> None:
    text = (
        "import lightning as L\nfrom paceline.lightning import PacelineStrategy\n"
        "L.Trainer(strategy=PacelineStrategy()).fit(model)\n"
    )
    assert advise(Source(text), "train.py") is None
    assert not read(Source(text), "train.py").has_group


def test_library_that_reads_ranks_gets_none() -> None:
    """Otherwise accelerate would make a process group of its own beside the workers of the run."""
    for text in ("import transformers\n", "from accelerate.utils import set_seed\n"):
        assert read(Source(text), "train.py").has_group


def test_condition_on_the_machine_is_removed() -> None:
    """With accelerators each worker would take the branch."""
    text = BEFORE.replace(
        '    dist.init_process_group("gloo")\n',
        '    if torch.cuda.device_count() > 1:\n        dist.init_process_group("gloo")\n',
    ).replace(
        "    model = DDP(model)\n",
        "    if torch.cuda.device_count() > 1:\n        model = DDP(model)\n",
    )
    ported = port(text)
    assert "DDP(model)" not in ported
    assert "init_process_group" not in ported


def test_script_with_a_group_and_paceline_is_told_of_unset_ranks() -> None:
    source = Source(
        "import os, paceline\nimport torch.distributed as dist\n"
        'if "RANK" in os.environ:\n    dist.init_process_group()\npace = paceline.connect()\n'
    )
    result = read(source, "train.py")
    assert result.has_group
    assert result.notes[0].startswith("train.py:4 makes a torch.distributed process group")


def test_invalid_python_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("x = 1\ndef (:\n")
    with pytest.raises(ConfigError, match=r"train\.py:2 is not valid Python .*: def \(:"):
        check_script(ScriptProgram(path=str(tmp_path / "train.py")))


def test_module_is_found_as_by_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "ddp.py").write_text(BEFORE)
    with pytest.raises(ConfigError, match=r"^jobs/ddp\.py:10 uses torch's own process group"):
        check_script(ScriptProgram(path="jobs.ddp", is_module=True))


def test_check_writes_and_runs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(BEFORE + "\nraise SystemExit('it was run')\n")
    before = path.read_bytes()
    with pytest.raises(ConfigError):
        check_script(ScriptProgram(path=str(path)))
    assert path.read_bytes() == before


def test_kept_code_keeps_comments_and_layout() -> None:
    text = BEFORE.replace(
        "    dist.destroy_process_group()\n",
        "    # the end\n    dist.destroy_process_group()  # yes\n",
    ).replace("sampler.set_epoch(epoch)\n", 'sampler.set_epoch(epoch); print("x")\n')
    ported = port(text)
    assert "    # the end\n" in ported
    assert "# yes" not in ported
    assert '        print("x")\n' in ported


def test_comments_above_a_step_move_with_it() -> None:
    text = BEFORE.replace(" in loader:\n", " in loader:  # all\n            # first\n")
    assert (
        "        for inputs, targets in loader:  # all\n"
        "            with pace.step():\n"
        "                # first\n"
        "                optimizer.zero_grad()\n"
    ) in port(text)


def test_tabs_and_line_endings_are_kept() -> None:
    assert port(BEFORE.replace("    ", "\t")) == AFTER.replace("    ", "\t")
    assert port(BEFORE.replace("\n", "\r\n")) == AFTER.replace("\n", "\r\n")


def test_multiline_lists_stay_multiline() -> None:
    text = BEFORE.replace(
        "(data, batch_size=8, sampler=sampler)",
        "(\n        data,\n        sampler=sampler,\n        shuffle=False,\n    )",
    ).replace(
        "import DataLoader, DistributedSampler, TensorDataset",
        "import (\n    DataLoader,\n    TensorDataset,\n    DistributedSampler,\n)",
    )
    ported = port(text)
    assert "(\n        data,\n        shuffle=True,\n    )\n" in ported
    assert "import (\n    DataLoader,\n    TensorDataset,\n)\n" in ported


def test_device_is_matched_by_its_full_name() -> None:
    text = BEFORE.replace("DDP(model)", "DDP(model, device_ids=[rank])").replace(
        "import torch\n", "import torch\nfrom mine import args\n", 1
    )
    ported = port(text.replace("nn.Linear(4, 2)", "nn.Linear(4, 2).to(torch.device(args.rank))"))
    assert "torch.device(args.rank)" in ported
    ported = port(text.replace("nn.Linear(4, 2)", "nn.Linear(4, 2).cuda(rank, non_blocking=True)"))
    assert "nn.Linear(4, 2).to(pace.device, non_blocking=True)" in ported


def test_libcst_is_imported_only_when_needed() -> None:
    code = (
        "import sys; from paceline.porting.porting import check_script; "
        "from paceline.program import ScriptProgram; "
        f"check_script(ScriptProgram(path={__file__!r})); sys.exit('libcst' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


LOOP = """
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
HEAD = """import torch
from torch import nn
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""


@pytest.mark.parametrize(
    ("count", "updates"),
    [
        ("start, steps or 20", "(steps or 20) - start"),
        ("1, 10 if short else n + 1", "(10 if short else n + 1) - 1"),
        ("1, n + 1", "n"),
    ],
)
def test_number_of_iterations_is_the_difference_of_the_bounds(count: str, updates: str) -> None:
    text = f"{HEAD}for it in range({count}):\n    loss = model(torch.ones(1, 4)).sum(){LOOP}"
    assert f"pace.updates({updates})" in port(text)


def test_skipped_iterations_are_refused_as_updates() -> None:
    loop = "for it in range(9):\n    loss = model(torch.ones(1, 4)).sum()\n    loss.backward()\n"
    loop += "    if (it + 1) % 3:\n        continue\n    optimizer.step()\n"
    with pytest.raises(CannotDerive, match="steps in some iterations only"):
        port(HEAD + loop + "    optimizer.zero_grad()\n")


@pytest.mark.parametrize(
    ("numbers", "epochs"),
    [
        ("reversed(range(3))", "pace.epochs(list(reversed(range(3))))"),
        ("tqdm(range(3))", "tqdm(pace.epochs(3))"),
        ("range(1, 4)", "pace.epochs(range(1, 4))"),
    ],
)
def test_epochs_of_any_iterable_are_ported(numbers: str, epochs: str) -> None:
    text = HEAD + "from tqdm import tqdm\n"
    text += "data = torch.utils.data.DataLoader(torch.ones(8, 4))\n"
    text += f"for epoch in {numbers}:\n    for x in data:\n        loss = model(x).sum()"
    assert f"for epoch in {epochs}:" in port(text + LOOP.replace("\n    ", "\n        "))


@pytest.mark.parametrize(
    ("before", "last"),
    [
        ("batch = draw()\nprint(batch.shape)\n", "    batch = draw()\n"),
        ("batch = draw()\n", "    if batch.sum() > 3:\n        batch = draw()\n"),
    ],
)
def test_value_made_before_a_loop_and_needed_there_stays(before: str, last: str) -> None:
    draw = "def draw():\n    return torch.randn(8, 4)\n"
    text = f"{HEAD}{draw}{before}for it in range(9):\n    loss = model(batch).sum(){LOOP}{last}"
    assert "\nbatch = draw()\n" in port(text)


def test_file_open_during_training_is_not_guarded_by_is_main() -> None:
    train = "def train():\n    for x in data:\n        loss = model(x).sum()"
    train += LOOP.replace("\n    ", "\n        ")
    data = "data = torch.utils.data.DataLoader(torch.ones(8, 4))\n"
    rest = 'with open("log", "w") as log:\n    for epoch in range(3):\n        train()\n'
    assert "is_main" not in port(HEAD + data + train + rest)
    grown = "known = []\n" + HEAD + data + "for epoch in range(3):\n"
    grown += "    for x in data:\n        loss = model(x).sum()" + LOOP.replace(
        "\n    ", "\n        "
    )
    grown += '    with open("log", "a") as log:\n        known.append(epoch)\n'
    assert "is_main" not in port(grown)
    assert "is_main" in port(grown.replace("known.append(epoch)", "log.write(str(epoch))"))


def test_byte_order_mark_stays_first(tmp_path: Path) -> None:
    path = tmp_path / "marked.py"
    loop = f"for it in range(9):\n    loss = model(torch.ones(1, 4)).sum(){LOOP}"
    path.write_text("\ufeff" + HEAD + loop, encoding="utf-8")
    check_script(ScriptProgram(path=str(path)))
    diff = check(ScriptProgram(path=str(path))).diff
    subprocess.run(["patch", "-p0"], input=diff, text=True, cwd=tmp_path, check=True)
    assert path.read_text(encoding="utf-8").startswith("\ufeffimport paceline\n")


def test_names_assigned_by_accelerate_are_kept() -> None:
    text = HEAD.replace("import torch\n", "import torch\nfrom accelerate import Accelerator\n", 1)
    text += """accelerator = Accelerator()
train_loader = torch.utils.data.DataLoader(torch.ones(8, 4))
test_loader = torch.utils.data.DataLoader(torch.ones(8, 4))
model, optimizer, train_dl, test_dl = accelerator.prepare(
    model, optimizer, train_loader, test_loader
)
for epoch in range(3):
    for x in train_dl:
        optimizer.zero_grad()
        accelerator.backward(model(x).sum())
        optimizer.step()
    print(len(test_dl))
torch.save(accelerator.unwrap_model(model=model).state_dict(), "model.pt")
"""
    after, _ = leave_accelerate(text)
    assert "\ntest_dl = test_loader\n" in after
    assert "torch.save(model.state_dict()" in after


def test_random_changes_after_a_step_are_not_moved_into_a_hook() -> None:
    loop = f"for it in range(9):\n    loss = model(torch.ones(1, 4)).sum(){LOOP}"
    behind = "    with torch.no_grad():\n        for p in model.parameters():\n            p.{}\n"
    assert "register_step_post_hook" in port(HEAD + loop + behind.format("clamp_(-1, 1)"))
    noise = behind.format("add_(torch.randn_like(p), alpha=0.1)")
    assert "register_step_post_hook" not in port(HEAD + loop + noise)
    assert "register_step_post_hook" not in port(HEAD + loop + behind.format("data.normal_()"))
