"""``paceline env``: what this machine is, and why its accelerator cannot be used."""

import sys
from typing import Annotated, Literal

from cyclopts import Parameter

from .flags import Json, show


def env(
    *,
    require: Annotated[
        Literal["gpu"] | None,
        Parameter(help="With gpu, end with exit code 1 where no GPU can be used."),
    ] = None,
    json: Json = False,
) -> None:
    """The processor, memory, disks, devices and libraries here, as a bug report needs them.

    Where an accelerator is present and none can be used: one cause and one command. The exit code
    is 0 where one can be used, or none is present; 1 where one is present and none can be used.

    Example: paceline env --require gpu
    """
    from ..machine.causes import find_cause
    from ..machine.inventory import read_inventory
    from ..machine.lines import render
    from ..machine.source import MachineSource

    machine = read_inventory(MachineSource())
    verdict = find_cause(machine)
    show(
        json,
        lambda: {**verdict.to_json(), "machine": machine.to_json()},
        lambda: render(machine, verdict),
    )
    if verdict.cause is not None or (require is not None and not verdict.is_usable):
        sys.exit(1)
