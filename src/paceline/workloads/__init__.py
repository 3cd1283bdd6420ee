"""The table of tasks, and the lookup from a name on the command line to a task.

    base         the Task: model, data, loss, metrics and the numbers of a run
    images       softmax, mlp, mlp488k, lenet, alexnet; code shared by all image tasks
    resnets      resnet18, resnet50
    transformer, quadratic

A built-in task has a name, a user's task is ``package.module:attribute``. It must not know how a
task is run. It does not import torch before a task is created: a launcher checks the name and
fetches the data before any worker starts.
"""

import importlib
import os
import sys
import traceback
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

from ..data.fetch import Chooser, choose_here
from ..errors import ConfigError, PacelineError, unknown

if TYPE_CHECKING:
    from collections.abc import Callable

    from .base import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskEntry:
    """One line of the table: the function NAME in ``MODULE.py`` creates the task NAME."""

    name: str
    module: str
    data_set: str | None

    def factory(self) -> "Callable[[int, str | None, Chooser], Task]":
        """Return the function; this imports torch."""
        module = importlib.import_module(f".{self.module}", __package__)
        made: Callable[[int, str | None, Chooser], Task] = getattr(module, self.name)
        return made


TASKS: dict[str, TaskEntry] = {
    entry.name: entry
    for entry in (
        TaskEntry(name="softmax", module="images", data_set="fashion-mnist"),
        TaskEntry(name="mlp", module="images", data_set="fashion-mnist"),
        TaskEntry(name="mlp488k", module="images", data_set="fashion-mnist"),
        TaskEntry(name="lenet", module="images", data_set="fashion-mnist"),
        TaskEntry(name="alexnet", module="images", data_set="fashion-mnist"),
        TaskEntry(name="resnet18", module="resnets", data_set="fashion-mnist"),
        TaskEntry(name="resnet50", module="resnets", data_set="fashion-mnist"),
        TaskEntry(name="transformer", module="transformer", data_set=None),
        TaskEntry(name="quadratic", module="quadratic", data_set=None),
    )
}


def find_task(spec: str) -> TaskEntry | None:
    """Return the entry for ``spec``, or None for a user's task; imports nothing.

    Raises:
        ConfigError: ``spec`` is neither.
    """
    if ":" in spec:
        module_name, _, attribute = spec.partition(":")
        if not module_name or not attribute:
            raise ConfigError(f"task {spec!r} must have the form package.module:attribute")
        if "/" in module_name or module_name.endswith(".py"):
            *folders, file = module_name.removesuffix(".py").removeprefix("./").split("/")
            place = f", in the folder {'/'.join(folders)}" if folders else ""
            raise ConfigError(
                f"task {spec!r} names a file instead of a module; use {file}:{attribute}{place}"
            )
        return None
    if spec not in TASKS:
        error = unknown("task", spec, TASKS)
        raise ConfigError(f"{error}; for your own task use package.module:attribute")
    return TASKS[spec]


def load_task(
    spec: str, num_workers: int = 1, init: str | None = None, chooser: Chooser = choose_here
) -> "Task":
    """Return the task that ``spec`` names.

    Args:
        spec: one of TASKS, or "package.module:attribute", where the attribute is a Task or a
            function without arguments that returns one; the current folder can be imported from.
        num_workers: some tasks scale their batch with it.
        init: name of an initialisation; each built-in task has its own.
        chooser: chooses the data set; the default considers only local data.

    Raises:
        ConfigError: no such task, module or attribute; or it is not a task; or its module fails.
    """
    entry = find_task(spec)
    if entry is not None:
        return entry.factory()(num_workers, init, chooser)
    if init is not None:
        raise ConfigError(
            f"--init {init!r} is set, but {spec} initialises its model itself; leave --init out"
        )
    return _own_task(spec)


def _own_task(spec: str) -> "Task":
    from .base import Task

    module_name, _, attribute = spec.partition(":")
    value = _attribute(import_module(module_name, spec), attribute, spec)
    if callable(value):
        try:
            value = value()
        except PacelineError:
            raise
        except Exception as error:  # the user's code may raise anything
            raise ConfigError(f"task {spec} could not be created: {_last_line(error)}") from error
    if not isinstance(value, Task):
        raise ConfigError(
            f"{spec} must be a paceline.Task or a function without arguments that returns one, "
            f"got {type(value).__name__}"
        )
    return value


def import_module(name: str, spec: str) -> ModuleType:
    """Import the module of a user's task.

    Raises:
        ConfigError: there is no such module, or importing it fails.
    """
    # As with `python -m`, a user's module is in the current folder. It stays on the path, because
    # the module may import its neighbours later.
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise ConfigError(
                f"no module {error.name!r} for task {spec} (looked in {folder} and the installed "
                f"packages); for a file mytasks.py use mytasks:attribute"
            ) from error
        raise ConfigError(f"importing {name} failed: {_last_line(error)}") from error
    except Exception as error:  # the same
        raise ConfigError(f"importing {name} failed: {_last_line(error)}") from error


def _attribute(module: ModuleType, name: str, spec: str) -> object:
    if hasattr(module, name):
        return getattr(module, name)
    known = [
        key
        for key, value in vars(module).items()
        if getattr(value, "__module__", None) == module.__name__ or type(value).__name__ == "Task"
    ]
    raise unknown("attribute", name, known, f"task {spec}, in {module.__file__}")


def _last_line(error: Exception) -> str:
    """Return the error and the line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    if isinstance(error, SyntaxError):
        place = f" ({error.filename}:{error.lineno})"
        return f"SyntaxError: {error.msg}{place}"
    return f"{type(error).__name__}: {error}{place}"
