"""The table of tasks, and the way from a name on the command line to a task.

    base         what a task is: model, data, loss, metrics and the numbers of a run
    images       softmax, mlp, mlp488k, lenet, alexnet; what all tasks on images share
    resnets      resnet18, resnet50
    transformer, quadratic

A built-in task is named by its name, the user's own by ``package.module:attribute``. It must not
know how a task is run. It imports no torch before a task is made: a launcher checks a name, and
fetches the data that it wants, before any worker starts.
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
    """One line of the table: the task NAME is made by the function NAME in ``MODULE.py``."""

    name: str
    module: str
    data_set: str | None

    def factory(self) -> "Callable[[int, str | None, Chooser], Task]":
        """The function; importing it imports torch."""
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
    """The table's line for ``spec``, or None for a task of the user's own; imports nothing.

    Raises:
        ConfigError: ``spec`` is neither.
    """
    if ":" in spec:
        module_name, _, attribute = spec.partition(":")
        if not module_name or not attribute:
            raise ConfigError(f"task {spec!r} must read package.module:attribute")
        if "/" in module_name or module_name.endswith(".py"):
            *folders, file = module_name.removesuffix(".py").removeprefix("./").split("/")
            place = f", in the folder {'/'.join(folders)}" if folders else ""
            raise ConfigError(
                f"task {spec!r} names a file, a module is wanted: {file}:{attribute}{place}"
            )
        return None
    if spec not in TASKS:
        error = unknown("task", spec, TASKS)
        raise ConfigError(f"{error}; for a task of your own give package.module:attribute")
    return TASKS[spec]


def load_task(
    spec: str, num_workers: int = 1, init: str | None = None, chooser: Chooser = choose_here
) -> "Task":
    """The task that ``spec`` names.

    Args:
        spec: one of TASKS, or "package.module:attribute", where the attribute is a Task or a
            function without arguments that returns one; the current folder can be imported from.
        num_workers: some tasks scale their batch with it.
        init: which initialisation; each built-in task knows its own.
        chooser: how a data set is chosen; the default looks only at what is here.

    Raises:
        ConfigError: no such task, module or attribute; or it is no task; or its module fails.
    """
    entry = find_task(spec)
    if entry is not None:
        return entry.factory()(num_workers, init, chooser)
    if init is not None:
        raise ConfigError(
            f"initialisation {init!r} was asked for, but {spec} initialises its model itself; "
            f"leave --init out"
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
            raise ConfigError(f"task {spec} could not be made: {_last_line(error)}") from error
    if not isinstance(value, Task):
        raise ConfigError(
            f"{spec} must be a paceline.Task or a function without arguments that returns one, "
            f"got {type(value).__name__}"
        )
    return value


def import_module(name: str, spec: str) -> ModuleType:
    """The module of a task of the user's own.

    Raises:
        ConfigError: there is none, or it fails.
    """
    # As `python -m` has it: a user's module lies in the folder the command is given in. It stays
    # on the path, because the module may import its neighbours later.
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
                f"packages); a file mytasks.py is named mytasks:attribute"
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
    """What was raised, and the line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    if isinstance(error, SyntaxError):
        place = f" ({error.filename}:{error.lineno})"
        return f"SyntaxError: {error.msg}{place}"
    return f"{type(error).__name__}: {error}{place}"
