"""``paceline train``: train a task and print what came of it."""

from cyclopts import App

from ..program import TaskProgram
from .flags import NO_FLAGS, ConfigFile, RunFlags, settings_of
from .running import run_program


def register(app: App) -> None:
    """Put the verb into the application."""
    app.command(train)


def train(task: str, /, *, flags: RunFlags = NO_FLAGS, config: ConfigFile = None) -> None:
    """Train a task with several workers, and report.

    Parameters
    ----------
    task
        softmax, mlp, lenet, alexnet, resnet18, resnet50, transformer, quadratic, or your own:
        package.module:task.
    """
    run_program(TaskProgram(task=task), settings_of(flags, config))
