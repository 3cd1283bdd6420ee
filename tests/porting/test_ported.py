"""DistributedDataParallel scripts of the usual forms train with their diff applied."""

import re
from pathlib import Path

import pytest

from paceline.porting.porting import advise, read
from paceline.porting.reading import Source
from paceline.porting.rewrite import port
from runs import run_script

SHAPES = Path(__file__).parent / "ddp"
CARRIED = {  # and the number each prints per epoch, and whether it grows
    "trainer_class": ("loss", False),
    "trainer_torchrun": ("loss", False),
    "spawned_functions": ("accuracy", True),
    "module_level": ("loss", False),
    "imagenet_style": ("loss", False),
    "ddp_flag": ("loss", False),
    "several_networks": ("loss", False),
}
NEED_A_HAND = ("shared_loop",)
"""A single loop trains and tests."""


def text_of(name: str) -> str:
    return (SHAPES / f"{name}.py").read_text()


@pytest.mark.parametrize("name", CARRIED)
def test_ported_script_trains_with_two_workers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ported = port(text_of(name))
    script = tmp_path / f"{name}.py"
    script.write_text(ported)
    assert advise(Source(ported), name) is None
    has_ranks = not read(Source(ported), name).has_group
    run = run_script(script, tmp_path, workers=2, has_ranks=has_ranks)
    assert {fact.ticket.member for fact in run.pushes} == {0, 1}
    word, grows = CARRIED[name]
    output = (run.folder / "logs" / "worker-0.log").read_text()
    values = [float(one) for one in re.findall(rf"{word} ([0-9.]+)", output)]
    assert len(values) == 6
    assert values[-1] > values[0] if grows else values[-1] < values[0]
    used = run.used()
    assert [set(one.values()) for one in used] == [{1}] * 6
    assert [len(one) for one in used] == [64] * 6


@pytest.mark.parametrize("name", NEED_A_HAND)
def test_unfollowed_script_gets_the_lines_and_their_places(name: str) -> None:
    hint = advise(Source(text_of(name)), "train.py")
    assert hint is not None
    assert "these lines in place of those:" in hint
    assert re.search(r"pace = paceline\.connect\(\)  # instead of line \d+\n", hint)
    assert re.search(r'batch="per-worker"\)  # instead of line \d+\n', hint)


def test_loop_that_draws_its_batches_counts_updates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ported = port(text_of("own_batches"))
    assert "for _ in pace.updates(20):\n    with pace.step():\n" in ported
    script = tmp_path / "own_batches.py"
    script.write_text(ported)
    run = run_script(script, tmp_path, workers=2, has_ranks=False)
    assert run.summary.updates == 20


def test_reduction_over_the_group_is_named_not_rewritten() -> None:
    hint = advise(Source(text_of("reduced_metrics")), "train.py")
    assert hint is not None
    assert hint.rstrip().endswith(": dist.all_reduce(right, op=dist.ReduceOp.SUM)")


def test_every_script_is_tested() -> None:
    tried = {*CARRIED, *NEED_A_HAND, "reduced_metrics", "own_batches"}
    assert {path.stem for path in SHAPES.glob("*.py")} == tried
