"""What the workers of a run execute: a task by the standard loop, or the user's own script.

The launcher hands one of these to every worker. This module must not know processes, models or
settings.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from .errors import ConfigError

if TYPE_CHECKING:
    from .workloads.base import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskProgram:
    """Train a task with the standard loop.

    Args:
        task: a built-in name, ``package.module:attribute``, or the task itself.
    """

    task: "str | Task"

    @property
    def name(self) -> str:
        """A short name for people and for the run's folder."""
        return self.task if isinstance(self.task, str) else self.task.name

    def describe(self) -> dict[str, object]:
        """What runs, as plain data."""
        return {"task": self.name}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptProgram:
    """Run the user's own script as ``__main__`` in every worker.

    Args:
        path: a file, or a module's dotted name where ``is_module``.
        args: what follows the script's name on the command line; the script's own.
        has_ranks: whether RANK, WORLD_SIZE and their like are set for it; not where it would take
            them for a process group of torch's own.
    """

    path: str
    args: tuple[str, ...] = ()
    is_module: bool = False
    has_ranks: bool = True

    def __post_init__(self) -> None:
        if not self.path:
            raise ConfigError(
                "no script was named; write e.g. paceline launch --workers 4 train.py"
            )

    @property
    def name(self) -> str:
        """A short name for people and for the run's folder."""
        if self.is_module:
            return self.path.rpartition(".")[2]
        return self.path.replace("\\", "/").rpartition("/")[2].removesuffix(".py")

    def describe(self) -> dict[str, object]:
        """What runs, as plain data."""
        return {"script": self.name, "arguments": list(self.args)}


def written(program: "Program") -> str:
    """What is run, so that it can be found again: ``task lenet``; empty where it has no name."""
    if isinstance(program, ScriptProgram):
        return f"script {program.path}"
    return f"task {program.task}" if isinstance(program.task, str) else ""


Program: TypeAlias = TaskProgram | ScriptProgram
