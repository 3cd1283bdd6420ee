"""The program of each worker in a learning-rate range test of a user's script.

    connect -> prepare() with the ramp's scheduler -> the script as __main__, each step at the rate
               of its update -> all updates are made, or the loss has grown: the script ends

The first parameter group gets the rates of the ramp; other groups keep their ratio to it. A script
that sets rates in another way is refused, since its losses would be reported at wrong rates. This
module must not know how many workers there are.
"""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from paceline.bench.lr_worker import Diverging, LrRamp, at_its_rate, growing
from paceline.errors import ConfigError
from paceline.porting.porting import check_script
from paceline.program import ScriptProgram
from paceline.script.patches import replace_step
from paceline.script.unprepared import StraySchedulers
from paceline.script.worker import Pace, current_pace
from paceline.verification.ending import end_with_loop, end_with_run, run_for_updates


class RampedScript:
    """Patches the script's ``pace``, so that ``prepare`` adds the ramp's scheduler.

    Args:
        pace: the object that ``connect`` also gives the script.
    """

    def __init__(self, pace: Pace, ramp: LrRamp) -> None:
        self._pace, self._ramp = pace, ramp
        self._losses = Diverging()
        self._prepare = pace.prepare
        self.has_prepared = False
        pace.prepare = self.prepare  # type: ignore[method-assign]  # in this worker only
        pace.epochs = end_with_loop(pace.epochs)  # type: ignore[method-assign]  # the same
        pace.updates = end_with_loop(pace.updates)  # type: ignore[method-assign]  # the same

    def prepare(self, *objects: Any, **options: Any) -> Any:
        """Prepare the objects and the ramp's scheduler; return the objects without the scheduler.

        Raises:
            ConfigError: the script has a scheduler, several optimizers or one without a rate.
        """
        if self.has_prepared:
            return self._prepare(*objects, **options)
        self.has_prepared = True
        optimizer = _only_optimizer(objects)
        if schedulers := StraySchedulers(optimizer).found():  # prepared or not
            raise ConfigError(
                f"tune lr sets the learning rate of each update, but so does "
                f"{type(schedulers[0]).__name__}: remove it for the test, then restore it with the "
                "advised rate"
            )
        first_rate = float(optimizer.param_groups[0]["lr"])
        if not first_rate > 0.0:
            raise ConfigError(
                f"tune lr tries multiples of the script's learning rate, which must be > 0, got "
                f"{first_rate:g}"
            )
        scale = self._ramp.lowest / first_rate
        scheduler = growing(self._pace, optimizer, lambda update: scale * self._ramp.factor(update))
        *replaced, ramp = self._prepare(*objects, scheduler, **options)
        end_with_run(self._pace, tuple(replaced))
        prepared, own_step = self._pace._prepared, optimizer.step
        assert prepared is not None  # by the line above

        def step(*arguments: Any, **settings: Any) -> Any:
            _check(optimizer, scheduler)
            loss = prepared.gradients.loss
            value = at_its_rate(self._pace, ramp, partial(own_step, *arguments, **settings))
            self._add_loss(loss)
            return value

        replace_step(optimizer, step)
        return tuple(replaced)

    def _add_loss(self, loss: Tensor | None) -> None:
        """Record the loss of a step; the main worker ends the run once its loss diverges."""
        has_grown = loss is not None and self._losses.add(float(loss))
        if has_grown and self._pace.is_main and not self._pace.is_stopped:
            self._pace.stop()


def _check(optimizer: Optimizer, scheduler: LambdaLR) -> None:
    """Raise ConfigError if the rates differ from the ramp's."""
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    wanted = [float(rate) for rate in scheduler.get_last_lr()]
    if rates != wanted:
        raise ConfigError(
            f"tune lr sets the learning rate of each update (now {wanted[0]:g}), but the script "
            f"has set it to {rates[0]:g}: remove that for the test"
        )


def _only_optimizer(objects: tuple[Any, ...]) -> Optimizer:
    """Return the optimizer among the objects; ConfigError: not one with a learning rate."""
    optimizers = [item for item in objects if isinstance(item, Optimizer)]
    if len(optimizers) != 1 or any("lr" not in group for group in optimizers[0].param_groups):
        names = ", ".join(type(optimizer).__name__ for optimizer in optimizers) or "none"
        raise ConfigError(
            "tune lr needs one optimizer with a learning rate, but prepare() was given "
            f"{names}: try its rates by hand"
        )
    return optimizers[0]


def script_program(ramp: LrRamp, args: Sequence[str]) -> ScriptProgram:
    """Return the program that workers run for the ramp's script.

    Raises:
        ConfigError: there is no such file, or it lacks Paceline's lines.
    """
    path = Path(ramp.spec)
    if not path.is_file():
        raise ConfigError(f"there is no script {path}; name a file, or a task")
    report = check_script(ScriptProgram(path=str(path)))
    return ScriptProgram(
        path=f"{__package__}.lr_script", args=(ramp.write(), str(path.resolve()), *args),
        is_module=True, has_ranks=not report.has_group,
    )  # fmt: skip


def main() -> None:
    """Run the script that follows the ramp on the command line."""
    ramp, script, *args = sys.argv[1:]
    ramped = RampedScript(current_pace(), LrRamp.read(ramp))
    run_for_updates(script, args)
    if not ramped.has_prepared:
        raise ConfigError(
            f"{script} ended without calling pace.prepare(model, optimizer, loader), so there is "
            "no learning rate to set; add the lines that paceline launch --check prints"
        )


if __name__ == "__main__":
    main()
