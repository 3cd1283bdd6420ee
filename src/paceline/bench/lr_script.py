"""What each worker of a learning-rate range test of a user's script runs, and which runs that.

    connect -> prepare gets a scheduler more -> the script, as __main__; each of its steps has the
               rate of its update -> the updates are made, or the loss has grown: the script ends

The first parameter group gets the rates of the ramp, other groups theirs in the proportion that the
script gave them. Whatever else sets a rate is refused, since a loss would stand at a rate that it
did not have. This module must not know how many workers there are.
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
    """A script's ``pace``, whose ``prepare`` lets the rate grow.

    Args:
        pace: what ``connect`` gives, to the script as well.
    """

    def __init__(self, pace: Pace, ramp: LrRamp) -> None:
        self._pace, self._ramp = pace, ramp
        self._losses = Diverging()
        self._prepare = pace.prepare
        self.has_prepared = False
        pace.prepare = self.prepare  # type: ignore[method-assign]  # of this worker alone
        pace.epochs = end_with_loop(pace.epochs)  # type: ignore[method-assign]  # the same
        pace.updates = end_with_loop(pace.updates)  # type: ignore[method-assign]  # the same

    def prepare(self, *objects: Any, **options: Any) -> Any:
        """With the scheduler of the ramp, which the script does not see.

        Raises:
            ConfigError: the script has a scheduler, several optimizers or one without a rate.
        """
        if self.has_prepared:
            return self._prepare(*objects, **options)
        self.has_prepared = True
        optimizer = _only_optimizer(objects)
        if schedulers := StraySchedulers(optimizer).found():  # prepared or not
            raise ConfigError(
                f"tune lr sets the learning rate of each update, and so does "
                f"{type(schedulers[0]).__name__}: remove it for the test, and restore it with the "
                "rate found"
            )
        first = float(optimizer.param_groups[0]["lr"])
        if not first > 0.0:
            raise ConfigError(
                f"tune lr needs a learning rate > 0 in the script, whose multiples it tries, got "
                f"{first:g}"
            )
        scale = self._ramp.lowest / first
        scheduler = growing(self._pace, optimizer, lambda update: scale * self._ramp.factor(update))
        *made, grown = self._prepare(*objects, scheduler, **options)
        end_with_run(self._pace, tuple(made))
        prepared, own_step = self._pace._prepared, optimizer.step
        assert prepared is not None  # by the line above

        def step(*arguments: Any, **settings: Any) -> Any:
            _check(optimizer, scheduler)
            loss = prepared.gradients.loss
            result = at_its_rate(self._pace, grown, partial(own_step, *arguments, **settings))
            self._hear(loss)
            return result

        replace_step(optimizer, step)
        return tuple(made)

    def _hear(self, loss: Tensor | None) -> None:
        """The main worker ends the run where its loss has grown too far."""
        has_grown = loss is not None and self._losses.hear(float(loss))
        if has_grown and self._pace.is_main and not self._pace.is_stopped:
            self._pace.stop()


def _check(optimizer: Optimizer, scheduler: LambdaLR) -> None:
    """Raise ConfigError where the rate is not what the ramp has set."""
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    wanted = [float(rate) for rate in scheduler.get_last_lr()]
    if rates != wanted:
        raise ConfigError(
            f"tune lr sets the learning rate of each update ({wanted[0]:g} now), and the script "
            f"has set it to {rates[0]:g}: remove that for the test"
        )


def _only_optimizer(objects: tuple[Any, ...]) -> Optimizer:
    found = [one for one in objects if isinstance(one, Optimizer)]
    if len(found) != 1 or any("lr" not in group for group in found[0].param_groups):
        raise ConfigError(
            "tune lr is for one optimizer with a learning rate, and prepare() was given "
            f"{', '.join(type(one).__name__ for one in found) or 'none'}: try its rates by hand"
        )
    return found[0]


def script_program(ramp: LrRamp, args: Sequence[str]) -> ScriptProgram:
    """What workers run for a script, which the ramp names.

    Raises:
        ConfigError: there is none, or it has not Paceline's lines.
    """
    path = Path(ramp.spec)
    if not path.is_file():
        raise ConfigError(f"there is no script {path}; name a file, or a task")
    result = check_script(ScriptProgram(path=str(path)))
    return ScriptProgram(
        path=f"{__package__}.lr_script", args=(ramp.write(), str(path.resolve()), *args),
        is_module=True, has_ranks=not result.has_group,
    )  # fmt: skip


def main() -> None:
    """Run the script that is named behind the ramp."""
    ramp, script, *args = sys.argv[1:]
    ramped = RampedScript(current_pace(), LrRamp.read(ramp))
    run_for_updates(script, args)
    if not ramped.has_prepared:
        raise ConfigError(
            f"{script} ended without pace.prepare(model, optimizer, loader), so there is no "
            "learning rate to set; add the lines that paceline launch --check prints"
        )


if __name__ == "__main__":
    main()
