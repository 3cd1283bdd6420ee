"""The steps of a script under observation, and scripts that cannot be observed."""

import itertools
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch.utils.data import DataLoader

from forked import Forked
from paceline.cli.app import run
from paceline.doctor.examine import examine
from paceline.doctor.fixes.applying import undo
from paceline.doctor.fixes.asked import fix
from paceline.doctor.fixes.mending import with_edits
from paceline.doctor.observed import knobs, launching, pairs, session
from paceline.doctor.observed.child import FoundFile
from paceline.doctor.observed.clock import PartsClock
from paceline.doctor.observed.feed import WatchedFeed
from paceline.doctor.observed.knob import Knob
from paceline.doctor.observed.knobs import Setting, Share
from paceline.doctor.observed.launching import ScriptRun, observe
from paceline.doctor.observed.lines import render_observation
from paceline.doctor.observed.observation import (
    INPUT,
    OPTIMIZER,
    Observation,
    Price,
    PriceOutcome,
    Regime,
)
from paceline.doctor.observed.operations import Operations
from paceline.doctor.observed.patches import Patches, Place
from paceline.doctor.observed.record import Recorder
from paceline.errors import ConfigError
from paceline.machine.ceilings import write_machine
from paceline.system.processors import num_cores
from paceline.system.signals import SignalInterrupt

SLEPT = (Path(__file__).parent / "slept.txt").read_text()
"""Also measured by bench/doctor_prices.py."""
HEAD, LOOP = re.split(r"(?m)(?=^for epoch)", SLEPT)


@pytest.fixture(autouse=True)
def _forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the process of the script from one that has imported torch."""

    def begin(command: list[str], **given: Any) -> Forked:
        del given["stdin"], given["preexec_fn"]
        return Forked(command[command.index("-m") :], **given)

    monkeypatch.setattr(launching, "Popen", begin)


def script(folder: Path, text: str = HEAD + LOOP, decode_s: float = 0.0, workers: int = 0) -> Path:
    path = folder / "train.py"
    path.write_text(text.replace("{decode_s}", f"{decode_s}").replace("{workers}", f"{workers}"))
    return path


# -- pure ----------------------------------------------------------------------------------------


def test_step_parts_are_exclusive_and_sum_to_the_open_time() -> None:
    clock = PartsClock()
    clock.begin("forward", 1.0)
    clock.begin("wait", 2.0)
    clock.end(3.0)
    clock.end(4.5)
    clock.begin("optimizer", 5.0)
    assert clock.taken(6.0) == {"forward": 2.5, "wait": 1.0, "optimizer": 1.0}
    clock.end(7.0)
    assert clock.taken(9.0) == {"optimizer": 1.0}


def compared(ratios: list[float]) -> tuple[pairs.Pairs, int]:
    result = pairs.Pairs()
    for number, ratio in enumerate(ratios, 1):
        result.add(1.0, ratio)
        if result.is_done():
            return result, number
    return result, len(ratios)


def test_pairs_stop_early_once_the_interval_excludes_2_percent() -> None:
    result, number = compared([0.80, 0.81, 0.79, 0.80, 0.80])
    assert (result.outcome(), number) == (PriceOutcome.WORTH, 3)
    assert result.saved().low < 0.2 < result.saved().high
    result, number = compared([1.0, 1.001, 0.999, 1.0])
    assert (result.outcome(), number) == (PriceOutcome.NOTHING, 3)


def test_noise_is_not_reported_as_a_gain() -> None:
    result, number = compared([0.7, 1.3] * 12)
    assert (result.outcome(), number) == (PriceOutcome.UNKNOWN, pairs.MOST_PAIRS)


def test_next_fix_is_bounded_by_the_step_with_earlier_fixes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The optimizer takes 1 ms of 50 ms, and 1 ms of the 5 ms left by a better loader."""
    bounds: dict[str, float] = {}

    def knobs(
        hooks: object, feed: object, share: Share, cpu: float, *, on_cpu: bool
    ) -> Iterator[Knob]:
        for name in ("loader", "optimizer"):
            knob = Setting(name, "", list, list, bound=share(OPTIMIZER))
            bounds[name] = knob.bound
            yield knob

    def priced(self: session.Session, knob: Knob, kept: object) -> session.Steps[Price]:
        yield
        return Price(name=knob.name, fix="", outcome=PriceOutcome.WORTH, saved=0.9)

    def together(self: session.Session, kept: object) -> session.Steps[Price]:
        yield
        return Price(name="both", fix="", outcome=PriceOutcome.WORTH)

    for name in ("Hooks", "WatchedFeed", "Patches"):
        monkeypatch.setattr(session, name, MagicMock())
    monkeypatch.setattr(session, "knobs_for", knobs)
    monkeypatch.setattr(session.Session, "_price", priced)
    monkeypatch.setattr(session.Session, "_together", together)
    results: list[Observation] = []
    asked = session.Session(60.0, "", results.append, list)
    seen = Observation(
        step_s=0.05, observed_s=0.05, parts={OPTIMIZER: 0.001}, num_steps=16, device="cpu"
    )
    for _ in asked._priced(seen):
        pass
    assert bounds == pytest.approx({"loader": 0.02, "optimizer": 0.2})
    assert results[-1].together is not None


class Slow:
    """A process whose steps take 100 s each on a clock that advances when read; then it waits.

    Attributes:
        now_s: its clock; file: the file its child writes.
    """

    def __init__(self, file: Path, steps: int) -> None:
        self.now_s, self.file, self._steps = 0.0, file, steps

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, _: float) -> None:
        self.now_s += 10.0

    def poll(self) -> None:
        made = min(self._steps, int(self.now_s // 100))
        if made:
            self.file.write_text(f'{{"steps": {made}}}')


def test_deterministic_algorithms_are_tried_off_and_restored() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        knob, *_ = knobs._of_process(on_cpu=True)
        assert knob.changes
        knob.turn(True)
        assert not torch.are_deterministic_algorithms_enabled()
        knob.turn(False)
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert all("repeat" not in one.name for one in knobs._of_process(on_cpu=True))


@pytest.mark.parametrize(
    ("steps", "over_s", "said"),
    [
        (0, 130.0, "made no step of a torch optimizer in 120 s"),
        (20, 2190.0, "at least 20 steps of a torch optimizer, and then none in 180 s"),
    ],
)
def test_observation_waits_for_any_number_of_slow_steps(
    steps: int, over_s: float, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(tmp_path / "found.json", steps)
    monkeypatch.setattr(launching, "time", slow)
    request = ScriptRun(script=Path("train.py"), price_s=0.0)
    assert launching._await(slow, request, slow.file)  # type: ignore[arg-type]  # stands for a process
    assert slow.now_s == over_s
    result = launching._read(slow.file)
    assert said in launching._why_not(result, request, True, None, tmp_path)


def test_first_step_is_recorded_at_once(tmp_path: Path) -> None:
    result = FoundFile(tmp_path / "found.json")
    for _ in range(3):
        result.stepped()
        assert launching._read(tmp_path / "found.json") == {"steps": 1}
    result.add(how="returned")
    assert launching._read(tmp_path / "found.json") == {"steps": 1, "how": "returned"}


def test_function_whose_lines_are_known_runs_untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A preparation in plain Python would take many times as long."""
    optimizers = sys.modules["torch.optim.optimizer"]
    monkeypatch.setattr(optimizers, "register_optimizer_step_pre_hook", MagicMock())
    text = "def count(n):\n    while n:\n        n -= 1\n    return get(0).f_trace_lines\n"
    text += "first = count(3)\nagain = count(3)\nfrom sys import _getframe\n"
    recorder, names = Recorder("train.py", 20, list), {"get": sys._getframe}
    before = sys.gettrace()
    sys.settrace(recorder._entered)
    try:
        exec(compile(text, "train.py", "exec"), names)
    finally:
        sys.settrace(before)
    assert names["first"] is False
    assert recorder.record().lines == tuple(range(1, 8))


# -- scripts -------------------------------------------------------------------------------------


def test_slow_loader_is_found_and_its_workers_are_priced(tmp_path: Path) -> None:
    seen = observe(
        ScriptRun(script=script(tmp_path, decode_s=0.002), price_s=3.0, only="num_workers")
    )
    assert seen.regime is Regime.INPUT
    assert sum(seen.parts.values()) == pytest.approx(seen.observed_s, rel=1e-6)
    assert seen.parts[INPUT] > 8 * 0.002
    assert seen.share(INPUT) > 0.7
    (price,) = [one for one in seen.prices if one.name.startswith("num_workers")]
    assert price.pairs >= 2 or price.reason
    assert (Path(price.file).name, price.line) == ("train.py", 14)
    text = "\n".join(render_observation("train.py", seen))
    assert "train.py: input bound" in text
    assert price.name in text


READS = (
    LOOP.replace("model(x), y", "model(x).cpu(), y")
    + """\
        if loss > 0:
            for _ in range(300):
                seen = loss.item()
"""
)


@pytest.mark.parametrize(
    ("more", "ended"),
    [
        ("", ""),
        ("        assert seen == loss.item()\n",
         "item() every N steps does not work here, and ended it: AssertionError"),
    ],
    ids=["only-shown", "needed"],
)  # fmt: skip
def test_only_numbers_are_read_less_often(more: str, ended: str, tmp_path: Path) -> None:
    """An old tensor has an old graph, and an old condition ends no loop."""
    path = script(tmp_path, HEAD + READS + more)
    seen = observe(ScriptRun(script=path, price_s=3.0, only="item()"))
    assert seen.ended.startswith(ended) if ended else not seen.ended
    prices = {price.name: price.pairs for price in seen.prices}
    assert prices.get("item() every N steps", 0) >= 2 or ended


def test_numbers_that_are_not_read_come_after_all_but_the_model() -> None:
    """An old one may end the script, and compiling may take all the time that is left."""
    hooks, feed = MagicMock(), MagicMock(loader=None)
    model = torch.nn.Linear(4, 2)
    hooks.optimizer, hooks.models = torch.optim.SGD(model.parameters()), {0: model}
    hooks.longest_skippable = Place("train.py", 3), "item()"
    names = [one.name for one in knobs.knobs_for(hooks, feed, lambda *_: 1.0, 1.0, on_cpu=True)]
    number = names.index("item() every N steps")
    assert any(name.startswith("optimizer") for name in names[:number])
    assert names[number + 1 :] == ["torch.compile", "bfloat16"]


def test_only_without_a_matching_fix_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = script(tmp_path)
    assert run(["doctor", str(whole), "--seconds", "0.5", "--only", "num_wrkers"]) == 0
    assert (
        "--only num_wrkers: no fix with a name that begins with this was tried"
        in capsys.readouterr().err
    )


def test_matrix_products_are_compared_to_the_machine_ceiling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text = script(tmp_path, decode_s=0.0).read_text()
    whole = tmp_path / "whole.py"
    whole.write_text(text.replace("set_num_threads(1)", f"set_num_threads({num_cores()})"))
    write_machine({"matmul_fp32_op_per_s": 1e15})
    seen = observe(ScriptRun(script=whole, price_s=0.5, only="num_workers"))
    assert 0 < seen.op_per_s < 1e15 == seen.most_op_per_s
    output = "\n".join(render_observation("whole.py", seen))
    assert "of what products of matrices in fp32 reach here (paceline probe, 20" in output
    unknown = replace(seen, most_op_per_s=0.0)
    assert "products of matrices in" not in "\n".join(render_observation("whole.py", unknown))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import torch\nimport sys\nsys.exit('train.py: error: give --data')\n",
         "exit code 1 before a training step, and prints: 'train.py: error: give --data'"),
        ("import torch\nraise ValueError('no data')\n",
         r"fails before a training step: ValueError: no data \(.*train.py:2\)"),
        ("import torch\nprint('done')\n", "ends before enough steps of a torch optimizer"),
        ("import os, torch\nos.kill(os.getpid(), 9)\n", "was ended by signal 9"),
        ("import time, torch\ntime.sleep(100)\n", "made no step of a torch optimizer in 1 s"),
    ],
    ids=["arguments", "failing", "early", "killed", "for-ever"],
)  # fmt: skip
def test_unobservable_script_gets_a_one_line_error(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        observe(ScriptRun(script=script(tmp_path, text), first_s=1.0 if "time" in text else 60.0))
    assert "\n" not in str(caught.value)


def test_modules_in_the_working_folder_do_not_shadow_pythons_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script's own folder comes first, as under python."""
    monkeypatch.setattr(launching, "Popen", subprocess.Popen)
    folder = tmp_path / "scripts"
    folder.mkdir()
    (folder / "beside.py").write_text("WORD = 'from beside the script'")
    path = script(folder, "import beside\nraise SystemExit(beside.WORD)\n")
    (tmp_path / "random.py").write_text("raise OSError('not this one')")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="from beside the script"):
        observe(ScriptRun(script=path))


def test_child_processes_of_a_script_are_ended_with_it(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    held = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    text = f"import os, time, torch\nos.open({str(pipe)!r}, os.O_WRONLY)\n"
    text += "if not os.fork():\n    time.sleep(100)\n"
    with pytest.raises(ConfigError, match="processes that it starts"):
        observe(ScriptRun(script=script(tmp_path, text)))
    assert select.select([held], [], [], 20.0)[0], "who holds the other end is still there"
    assert os.read(held, 1) == b""
    os.close(held)


def test_terminating_the_doctor_ends_the_script(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    held = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    text = f"import os, time, torch\nos.open({str(pipe)!r}, os.O_WRONLY)\n"
    text += f"os.kill({os.getpid()}, {signal.SIGTERM:d})\ntime.sleep(100)\n"
    with pytest.raises(SignalInterrupt):
        observe(ScriptRun(script=script(tmp_path, text)))
    assert select.select([held], [], [], 20.0)[0], "the script is still there"
    assert os.read(held, 1) == b""
    os.close(held)


def test_fixes_are_proved_on_the_script_applied_and_undone(tmp_path: Path) -> None:
    """With dropout and shuffling: both versions draw the same numbers. No test is reached."""
    text = (
        HEAD.replace("nn.ReLU()", "nn.ReLU(), nn.Dropout()")
        + "total = 0.0\n"
        + LOOP.replace("backward()", "backward(retain_graph=True)")
        + "        total += loss\n"
        + "for x, y in loader:\n    hits = (model(x).argmax(1) == y).sum()\n"
    )
    path = script(tmp_path, text)
    before = path.read_text()
    run = ScriptRun(script=path, price_s=0.0)
    report = fix(run, examine(path), is_applied=True)
    assert [one.name for one in report.proof.kept] == ["graph-retained", "loss-keeps-graph"]
    assert report.proof.num_steps == 20
    line = before.splitlines().index("for x, y in loader:") + 1
    assert [(one.name, where) for one, where in report.proof.unreached] == [
        ("evaluated-with-gradients", line)
    ]
    assert any(f"line {line} was not seen to run in 20 steps" in one for one in report.lines())
    assert "no_grad" not in report.diff
    assert "+        total += loss.detach()\n" in report.diff
    assert path.read_text() == with_edits(before, report.proof.kept) != before
    undo(path)
    assert path.read_text() == before


# -- loaders -------------------------------------------------------------------------------------


@pytest.fixture
def feed() -> Iterator[WatchedFeed]:
    feed, patches = WatchedFeed(), Patches()
    feed.install(patches)
    yield feed
    patches.undo()
    assert "WatchedBatches" not in type(iter(DataLoader([1]))).__name__  # type: ignore[arg-type]


def loader_of(number: int) -> "DataLoader[int]":
    return DataLoader(list(range(number)), batch_size=2)  # type: ignore[arg-type]


def test_training_epoch_is_endless_while_fixes_are_tried(feed: WatchedFeed) -> None:
    loader = loader_of(4)
    assert [one.tolist() for one in loader] == [[0, 1], [2, 3]]
    for _ in loader:
        feed.step_done()
    assert feed.loader is loader
    assert (Path(feed.place.file).name, feed.place.line > 0) == ("test_observed.py", True)
    feed.is_endless = True
    seen = []
    for one in loader:
        feed.step_done()
        seen.append(one.tolist())
        if len(seen) == 5:
            break
    assert seen == [[0, 1], [2, 3], [0, 1], [2, 3], [0, 1]]


def test_evaluation_over_the_same_loader_still_ends(feed: WatchedFeed) -> None:
    loader = loader_of(4)
    for _ in loader:
        feed.step_done()
    feed.is_endless = True
    assert len(list(loader)) < 100


def test_batches_come_from_a_changed_loader_copy_or_a_cache(
    feed: WatchedFeed,
) -> None:
    loader = loader_of(8)
    batches = iter(loader)
    next(batches)
    feed.step_done()
    feed.is_endless = True
    feed.source = feed.varied(pin_memory=False)
    assert [next(batches).tolist() for _ in range(5)] == [[0, 1], [2, 3], [4, 5], [6, 7], [0, 1]]
    feed.source = None
    assert next(batches).tolist() == [2, 3]
    feed.is_cached = True
    assert [next(batches).tolist() for _ in range(3)] == [[2, 3]] * 3


def test_kept_loader_setting_stays_on_while_the_next_is_priced(
    feed: WatchedFeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def varied(**changes: Any) -> Iterator[dict[str, Any]]:
        made.append(changes)
        return itertools.repeat(changes)

    monkeypatch.setattr(feed, "varied", varied)
    feed.loader, feed.is_endless = loader_of(8), True
    batches = iter(feed.loader)
    first = knobs.Loader(feed, 1.0, num_workers=2)
    first.turn(True)
    second = knobs.Loader(feed, 1.0, pin_memory=True)
    assert (first.settle, first.settle_off) == (7, 1)
    assert (second.stride, second.settle, second.settle_off) == (2, 7, 7)
    for _ in range(2):
        second.turn(True)
        assert next(batches) == {"num_workers": 2, "pin_memory": True}
        second.turn(False)
        assert next(batches) == {"num_workers": 2}
    second.close()
    first.turn(False)
    assert next(batches).tolist() == [0, 1]
    assert len(made) == 2, "workers are started once for each copy"


def test_undo_restores_own_and_inherited_attributes() -> None:
    class Base:
        def name(self) -> str:
            return "base"

    class Own(Base):
        pass

    patches = Patches()
    patches.wrap(Own, "name", lambda call: lambda self: f"wrapped {call(self)}")
    assert Own().name() == "wrapped base"
    assert Base().name() == "base"
    patches.undo()
    assert Own().name() == "base"
    assert "name" not in vars(Own)


def test_no_part_of_a_step_is_negative() -> None:
    """If operations take longer than the whole step, the remainder rounds to below zero."""
    parts = {"forward": 0.1, "backward": 0.2, "optimizer": 0.1}
    seen = Observation(step_s=0.4, observed_s=0.4, parts=parts, num_steps=16, device="cpu")
    for number in range(1, 60):
        result = Operations(0.3 + number / 7, 0.1 + number / 11, 9.0, 0.0)
        assert f"{session._divided(seen, result).overhead_s:.0%}" == "0%"
