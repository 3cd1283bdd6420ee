"""``train`` and ``launch`` make a run; ``report`` and ``replay`` read its trace.

Above 300 lines with the help texts of four verbs.
"""

import os
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

from cyclopts import Parameter

from ..config import RunSettings, flag_of, resolve
from ..engines.torchrun.world import RankOfWorld, find_left_alone, find_rank
from ..errors import ConfigError, Interrupted
from ..launch.job import is_split, refuse_of_tasks
from ..launch.nodes import Nodes
from ..program import Program, ScriptProgram, TaskProgram
from ..system.signals import ended_by_signals
from . import flags as command
from .flags import (
    NO_FLAGS,
    ONE_NODE,
    ConfigFile,
    Json,
    NodeFlags,
    OfNodes,
    RunFlags,
    num_columns,
    say,
    settings_of,
    show,
    writable,
)

if TYPE_CHECKING:
    from ..replay import Replayed

_EVERY_S = 2.0


def train(
    task: str,
    /,
    *,
    nodes: OfNodes = ONE_NODE,
    flags: RunFlags = NO_FLAGS,
    config: ConfigFile = None,
) -> None:
    """Train a task with several workers, and report.

    Parameters
    ----------
    task
        softmax, mlp, mlp488k, lenet, alexnet, resnet18, resnet50, transformer, quadratic, or your
        own: package.module:task.
    """
    program = TaskProgram(task=task)
    flags = _run_among_ranks(program, nodes, flags, config)
    _run_program(program, settings_of(flags, config))


def launch(
    script: str = "",
    /,
    *args: str,
    module: Annotated[
        bool,
        Parameter(name=("-m", "--module"), negative=(), help="SCRIPT is the name of a module."),
    ] = False,
    check: Annotated[
        bool,
        Parameter(
            negative=(), help="Print a diff with the lines that SCRIPT needs, and run nothing."
        ),
    ] = False,
    nodes: OfNodes = ONE_NODE,
    flags: RunFlags = NO_FLAGS,
    config: ConfigFile = None,
) -> None:
    """Run a script with several workers.

    Example: paceline launch --workers 4 train.py --its-own 3

    Parameters
    ----------
    script
        A Python file, or with -m a module; paceline's flags go before it.
    args
        The script's own arguments, passed on unchanged.
    """
    from ..porting.porting import check_script

    program = ScriptProgram(path=script, args=args, is_module=module)
    if check:
        _check(program, flags, config, nodes)
        return
    flags = _run_among_ranks(program, nodes, flags, config)
    settings = settings_of(flags, config)
    verdict = check_script(program)
    notes = verdict.notes
    if settings.workers > 1 and verdict.writes:
        notes = (*notes, verdict.writes)
    _run_program(replace(program, has_ranks=not verdict.has_group), settings, notes)


def _check(
    program: ScriptProgram, flags: command.Flags, config: Path | None, nodes: NodeFlags
) -> None:
    """Print what a script needs: the diff on standard output, all else on standard error.

    Raises:
        ConfigError: it is not a script, or a setting is given that has no effect with --check.
    """
    from ..porting.check import check

    of_nodes = {name for name, value in asdict(nodes).items() if value is not None}
    settings = command.given(flags)
    if spare := sorted((settings.keys() - {"json"}) | of_nodes):
        raise ConfigError(
            f"--check only reads the script, so {flag_of(spare[0])} has no effect; leave it out, "
            "or leave out --check to run"
        )
    verdict = check(program)
    is_json = settings_of(flags, config).json
    if is_json:
        print(dumps(verdict.to_json(), allow_nan=False))
    elif verdict.diff:
        print(verdict.diff, end="")
    elif not verdict.reason:
        print(f"{verdict.script}: nothing to add")
    for note in () if is_json else (verdict.reason, *verdict.notes):
        if note:
            say(note)
    if verdict.reason:
        sys.exit(1)


def _run_among_ranks(
    program: Program, nodes: NodeFlags, flags: command.Flags, config: Path | None
) -> command.Flags:
    """Run as a rank or on several nodes, and never return; otherwise return a local run's flags.

    Returns:
        The flags of a run on this machine.

    Raises:
        ConfigError: these ranks are impossible, a script is given a setting of tasks, or this is
            the only worker left of a run.
    """
    rank = find_rank(os.environ)
    cluster = Nodes.from_flags(nodes.nodes, nodes.workers_per_node)
    if rank is not None:
        if cluster is not None:
            cluster.check(rank.size)
        _run_as_rank(rank, program, flags, config)
    resolved = resolve(command.given(flags), config)
    refuse_of_tasks(program, resolved)
    left = find_left_alone(os.environ)
    if left is not None and resolved.settings.resume is None:
        from ..launch.ranks import refuse_left_alone

        refuse_left_alone(left)
    if cluster is None:
        settings = resolved.settings
        if settings.engine == "local" and is_split(settings):
            Nodes(count=1, workers=settings.workers).begin(resolved, sys.argv[1:])
        return flags
    cluster.refuse_workers(resolved)
    if cluster.count > 1:
        cluster.begin(resolved, sys.argv[1:])
    return command.with_workers(flags, cluster.workers)


def _run_as_rank(
    rank: RankOfWorld, program: Program, flags: command.Flags, config: Path | None
) -> NoReturn:
    """Run as one worker: torchrun or a similar launcher started this command as a rank."""
    from ..engines.local.process import run_program
    from ..launch.ranks import run_as_rank

    run_as_rank(
        rank,
        program,
        lambda: resolve(command.given(flags), config),
        lambda context: run_program(program, context),
    )


def _run_program(program: Program, settings: RunSettings, notes: Sequence[str] = ()) -> None:
    """Run to the end; with ``json`` the one object is the summary, or the plan of a dry run.

    Args:
        notes: sentences on the program, shown before the run.
    """
    from ..engines.local.client import begun_early

    is_local = settings.engine == "local"
    with ended_by_signals(lambda number: False), begun_early() if is_local else nullcontext():
        _run(program, settings, notes)


def _run(program: Program, settings: RunSettings, notes: Sequence[str]) -> None:
    from ..launch.launcher import launch_run
    from ..report.live import choose_observer

    observer = choose_observer(settings.json)
    for note in notes:
        observer.note(note)
    try:
        summary = launch_run(program, settings, observer)
    except Interrupted as end:
        if settings.json:
            print(dumps(end.summary.to_json(), allow_nan=False))
        raise
    finally:
        observer.close()
    if settings.json:
        shown = summary if summary is not None else observer.shown_plan
        assert shown is not None
        print(dumps(shown.to_json(), allow_nan=False))


def report(
    run: Path = Path("runs/latest"),
    /,
    *,
    sample: int | None = None,
    position: int | None = None,
    json: Json = False,
) -> None:
    """Print the summary of a run again, or show how one sample was used.

    Example: paceline report runs/latest --sample 123

    Parameters
    ----------
    run
        The run's folder.
    sample
        Show which update used this sample of the data set, which worker computed it and how stale
        it was.
    position
        Show the same for a position in the epochs' order, where a script has its own sampler.
    """
    if sample is not None or position is not None:
        _report_sample(run, sample, position, is_json=json)
        return
    from ..report.summary import summarize
    from ..report.terminal import render_summary
    from ..report.trials import has_trials, read_trials

    if has_trials(run):
        trials = read_trials(run)
        show(json, trials.to_json, trials.render)
        return
    summary = summarize(run)
    show(json, summary.to_json, lambda: render_summary(summary, num_columns()))


def _report_sample(run: Path, sample: int | None, position: int | None, *, is_json: bool) -> None:
    from ..data.order import redraw
    from ..report.whereabouts import render_sample, report_sample
    from ..trace.records import Header

    if sample is not None and position is not None:
        raise ConfigError("--sample and --position both select a sample; give one of them")

    def draw(header: Header, epoch: int, num_samples: int) -> Sequence[int]:
        if position is not None:
            return range(num_samples)
        kind = header.text("order", "own")
        return redraw(kind, num_samples, header.number("seed"), epoch)

    wanted = sample if sample is not None else position
    assert wanted is not None
    uses = report_sample(run, wanted, draw)
    show(is_json, lambda: asdict(uses), lambda: render_sample(uses))


def replay(
    run: Path = Path("runs/latest"),
    /,
    *,
    until: int | None = None,
    save: Path | None = None,
    json: Json = False,
) -> None:
    """Repeat a task's run from its trace, in one process, and report whether the result is equal.

    Every decision and gradient is recomputed at the parameters that its worker had. On the
    machine of the run the result is equal in every bit; otherwise the first difference is
    printed and the exit code is 1.

    Example: paceline replay runs/latest --until 400

    Parameters
    ----------
    run
        The run's folder.
    until
        Stop after this many updates, and show the metrics there.
    save
        Write the model at the end into this file (safetensors).
    """
    from ..replay import replay as repeat_run

    if save is not None and save.parent.is_dir():  # else the replay makes it
        writable(save)
    start_s = time.perf_counter()
    replayed = repeat_run(run, until=until, save=save, on_progress=_Progress().progress)
    seconds = time.perf_counter() - start_s
    show(json, replayed.to_json, lambda: _lines(replayed, seconds, save))
    if not replayed.is_equal:
        sys.exit(1)


def _lines(result: "Replayed", seconds: float, saved: Path | None) -> list[str]:
    """The result in a few lines."""
    lines = [f"{result.pushes:,} pushes, {result.version:,} updates repeated in {seconds:.1f} s"]
    if result.difference:
        lines.append(f"different: {result.difference}")
        lines.append(
            "everything before it is equal; the code, the data, the number of threads or the "
            "machine must have changed"
        )
    elif result.is_model_equal is False:
        lines.append("different: every decision and loss is equal, but the final model is not")
    elif result.is_model_equal:
        lines.append("equal: every decision, every loss, and every bit of the final model")
    else:
        lines.append("equal so far: every decision and every loss")
    if result.metrics:
        values = ", ".join(f"test {name} {value:.4f}" for name, value in result.metrics.items())
        lines.append(f"at version {result.version:,}: {values}")
    if saved is not None:
        lines.append(f"model: {saved}")
    return lines


class _Progress:
    """A line on standard error every two seconds, so that results stay clean."""

    def __init__(self) -> None:
        self._next_s = time.perf_counter() + _EVERY_S

    def progress(self, version: int) -> None:
        now_s = time.perf_counter()
        if now_s >= self._next_s:
            self._next_s = now_s + _EVERY_S
            say(f"version {version:,}")
