"""Engines run the members: each one reports events to the controller and delivers its messages.

    base      the contract: seven verbs, and processes where members can be lost
    inline    the whole run in one process, for tests and debuggers
    local     processes on this machine, shared memory between them
    torchrun  processes that torchrun, srun or mpirun started, on any number of machines

They must not know protocols, nor what a plan contains. docs/add-an-engine.md shows how to add one.
"""

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:  # the fork server imports this package before it checks the imports
    from .base import Engine

ENGINES: Final = {
    "inline": "paceline.engines.inline:InlineEngine",
    "local": "paceline.engines.local.engine:LocalEngine",
    "torchrun": "paceline.engines.torchrun.engine:TorchrunEngine",
}
"""``--engine`` name -> class. As text, since the inline engine imports torch."""


def make_engine(name: str, num_workers: int) -> "Engine":
    """Return the engine of this name, with a seat for each worker.

    Raises:
        ConfigError: this machine cannot hold that many workers.
    """
    module, _, class_name = ENGINES[name].partition(":")
    engine: Engine = getattr(importlib.import_module(module), class_name)(num_workers)
    return engine
