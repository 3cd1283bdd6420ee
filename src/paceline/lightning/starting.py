"""How a script with a Trainer comes to be a run, and what of it no run can carry.

    python train.py --> Trainer.fit --> the script again, in each worker, under Paceline's launcher
                                          Trainer.fit --> trains

The first process computes nothing: it is the launcher, shows the run and ends with it. This module
must not know loops.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from json import dumps
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from ..checkpoints.resumption import adopt
from ..config import resolve
from ..errors import ConfigError, PacelineError
from ..launch.job import refuse_of_tasks
from ..launch.launcher import launch_run
from ..program import ScriptProgram
from ..protocols import parse
from ..report.live import choose_observer
from ..script.worker import Pace

_VERSIONS = ("2.6",)
"""Of Lightning that the tests ran with; its loops are no public interface."""
_MARK = "LIGHTNING_BY_PACELINE"
"""Set for workers that a strategy has started, with its own settings."""
_PRECISIONS = ("32-true", "64-true", "bf16-true", "bf16-mixed")
_EDITORS = (StochasticWeightAveraging, WeightAveraging, BaseFinetuning)
"""Callbacks that change weights, schedulers or the optimizer behind the run's back."""


class Starter:
    """What a strategy was asked for, and the launcher that begins such a run.

    Raises:
        ConfigError: this version of Lightning is none that was tested.
    """

    def __init__(self, protocol: str | None, settings: Mapping[str, Any]) -> None:
        version = lightning.__version__
        if not version.startswith(tuple(f"{one}." for one in _VERSIONS)):
            raise ConfigError(
                f"PacelineStrategy is written for lightning {' and '.join(_VERSIONS)}, and this is "
                f"{version}: pip install 'lightning=={_VERSIONS[-1]}.*'"
            )
        self.protocol = protocol
        self.settings = settings

    def launcher(self, devices: Sequence[torch.device]) -> "_Launcher | None":
        """For so many workers; None: this process is the only one, and there is no run.

        Raises:
            ConfigError: the protocol is none that one worker can follow.
        """
        if len(devices) > 1 or self.settings:
            return ScriptLauncher(self, devices)
        parse(self.protocol or "full-sync", 1)
        return None

    def run(self, devices: Sequence[torch.device]) -> None:
        """The script again, in as many workers as there are devices; until all have ended.

        Raises:
            ConfigError: a setting cannot be.
            WorkerError: a worker failed.
        """
        flags = {"workers": len(devices), "protocol": self.protocol, "device": devices[0].type}
        given = {**flags, **self.settings}
        resolved = resolve({k: v for k, v in given.items() if v is not None}, is_call=True)
        refuse_of_tasks(program := _this_script(), resolved)
        chosen = adopt(resolved)
        observer = choose_observer(chosen.json)
        os.environ[_MARK] = "1"
        try:
            summary = launch_run(program, chosen, observer)
        finally:
            observer.close()
            del os.environ[_MARK]
        if chosen.json and (shown := summary or observer.shown_plan) is not None:
            sys.stdout.write(dumps(shown.to_json(), allow_nan=False) + "\n")


class ScriptLauncher(_Launcher):
    """Starts the script again in workers when ``fit`` is called; this process ends with them."""

    def __init__(self, starter: Starter, devices: Sequence[torch.device]) -> None:
        self._starter = starter
        self._devices = devices

    @property
    def is_interactive_compatible(self) -> bool:
        return False

    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: Trainer, **kwargs: Any
    ) -> Any:
        if trainer.state.fn != TrainerFn.FITTING:
            return function(*args, **kwargs)
        trainer.callbacks, trainer.loggers = [], []  # they have seen nothing here
        try:
            self._starter.run(self._devices)
        except PacelineError as error:
            sys.stderr.write(f"error: {error}\n")
            sys.exit(2 if isinstance(error, ConfigError) else 1)
        except KeyboardInterrupt as end:
            sys.exit(128 + getattr(end, "signal", 2))
        sys.exit(0)

    def kill(self, signum: int) -> None:
        """Paceline's launcher ends its workers itself."""


def _this_script() -> ScriptProgram:
    """What ``python`` was asked to run.

    Raises:
        ConfigError: that is no file and no module.
    """
    main = sys.modules["__main__"]
    arguments = tuple(sys.argv[1:])
    if main.__spec__ is not None:
        name = main.__spec__.name.removesuffix(".__main__")
        return ScriptProgram(path=name, args=arguments, is_module=True)
    path = getattr(main, "__file__", None)
    if path is None:
        raise ConfigError(
            "PacelineStrategy starts the script again in every worker, and there is no script "
            "here; write it into a file: python train.py"
        )
    return ScriptProgram(path=str(Path(path).resolve()), args=arguments)


# -- what is refused -----------------------------------------------------------------------------


def refuse_another_run(starter: Starter, pace: Pace, devices: Sequence[torch.device]) -> None:
    """Raise ConfigError where the run that this worker is in is not the one that is asked for."""
    context = pace.context
    if context.resume is not None or context.respawn:
        raise ConfigError(
            "the Trainer keeps its own place: "
            + ("--resume" if context.resume is not None else "--respawn")
            + " cannot lead it there; go on with trainer.fit(..., ckpt_path=...)"
        )
    if devices and devices[0].type != pace.device.type:
        raise ConfigError(
            f"Trainer(accelerator=...) chose {devices[0].type} and this run computes on "
            f"{pace.device.type}: paceline launch --device {devices[0].type}"
        )
    if len(devices) not in (1, context.workers):
        raise ConfigError(
            f"Trainer(devices={len(devices)}), and this run has {context.workers} workers: "
            f"paceline launch --workers {len(devices)}"
        )
    if _MARK in os.environ:
        return
    if starter.settings:
        raise ConfigError(
            f"PacelineStrategy was given {', '.join(starter.settings)}, and this run was begun by "
            "paceline launch, which has its own settings: give them there"
        )
    asked, runs = starter.protocol, context.protocol
    if asked is not None and str(parse(asked, context.workers)) != str(
        parse(runs, context.workers)
    ):
        raise ConfigError(
            f"PacelineStrategy({asked!r}), and this run was begun with {runs}: "
            f"paceline launch --protocol {asked}, or PacelineStrategy(), which takes the run's"
        )


def refuse_what_is_not_carried(trainer: Trainer, layer_sync: object, num_nodes: int) -> None:
    """Raise ConfigError for the first thing that no run can carry."""
    if found := _not_carried(trainer, layer_sync, num_nodes):
        raise ConfigError(f"PacelineStrategy does not carry {found}")


def _not_carried(trainer: Trainer, layer_sync: object, num_nodes: int) -> str:
    """What is not carried, and what to write instead; empty where everything is."""
    module = trainer.lightning_module
    if not module.automatic_optimization:
        return (
            "manual optimization (automatic_optimization=False), whose steps nobody sees begin; "
            "write training_step() to return the loss, or the loop yourself: README, Four lines"
        )
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        return "training_step(dataloader_iter), which takes batches by itself: training_step(batch)"
    if getattr(module, "truncated_bptt_steps", 0) or hasattr(module, "tbptt_split_batch"):
        return (
            "truncated backpropagation (truncated_bptt_steps): split the sequences in the data set"
        )
    for one in trainer.callbacks:
        if isinstance(one, _EDITORS):
            return (
                f"the callback {type(one).__name__}, which changes weights or the optimizer behind "
                "the run: leave it out"
            )
    return _option_not_carried(trainer, layer_sync, num_nodes)


def _option_not_carried(trainer: Trainer, layer_sync: object, num_nodes: int) -> str:
    """Which of the Trainer's own options no run carries, and what to do; empty: none."""
    if trainer.precision not in _PRECISIONS:
        return f"precision={trainer.precision!r}: one of {', '.join(_PRECISIONS)}"
    # A float is a part of the epoch, an int is batches; a time is not kept under that name at all.
    every = getattr(trainer, "val_check_interval", "a time")
    is_whole = isinstance(every, float) and every == 1.0
    if not is_whole or trainer.check_val_every_n_epoch is None:
        return (
            f"val_check_interval={every!r}: workers hold one version between "
            "epochs alone; validate there: check_val_every_n_epoch=1"
        )
    if trainer.reload_dataloaders_every_n_epochs:
        return (
            "reload_dataloaders_every_n_epochs: the train loader is prepared once; let its data "
            "set change between epochs"
        )
    if layer_sync is not None:
        return (
            "sync_batchnorm=True: each mini-batch has its own statistics (docs/batches.md); leave "
            "it out"
        )
    if num_nodes != 1:
        return f"num_nodes={num_nodes}: the workers of a run are on one machine; num_nodes=1"
    pace = trainer.strategy.pace
    is_in_step = pace.context.is_spmd and not pace.context.is_difference
    accumulates = trainer.accumulate_grad_batches != 1 or any(
        isinstance(one, GradientAccumulationScheduler) for one in trainer.callbacks
    )
    if accumulates and pace.num_workers > 1 and not is_in_step:
        return (
            f"accumulate_grad_batches under {pace.context.protocol}, where nobody knows which "
            "batch is the last of a worker: --protocol full-sync, or a larger batch_size of the "
            "loader, which is shared"
        )
    return _checkpoint_not_carried(trainer, is_in_step) if pace.num_workers > 1 else ""


def _checkpoint_not_carried(trainer: Trainer, is_in_step: bool) -> str:
    """Which checkpoints several workers would decide on by themselves; empty: none."""
    pace = trainer.strategy.pace
    for one in trainer.callbacks:
        if isinstance(one, ModelCheckpoint):
            if one._every_n_train_steps and not is_in_step:
                return (
                    f"ModelCheckpoint(every_n_train_steps={one._every_n_train_steps}) under "
                    f"{pace.context.protocol}, where each worker comes by other versions and the "
                    "main one alone writes: --protocol full-sync, or every_n_epochs=1"
                )
            if one._train_time_interval is not None:
                return (
                    "ModelCheckpoint(train_time_interval=...), which the clock of each worker "
                    "decides: every_n_train_steps under full-sync, or every_n_epochs=1"
                )
    return ""
