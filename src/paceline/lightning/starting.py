"""Starts the run of a script with a Trainer, and refuses what no run supports.

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
"""Versions of Lightning that the tests run with; its loops are no public interface."""
_MARK = "LIGHTNING_BY_PACELINE"
"""Environment variable of workers that a strategy has started, with its own settings."""
_PRECISIONS = ("32-true", "64-true", "bf16-true", "bf16-mixed")
_EDITORS = (StochasticWeightAveraging, WeightAveraging, BaseFinetuning)
"""Callbacks that change weights, schedulers or the optimizer without the run."""


class Starter:
    """The settings of a strategy, and the launcher that starts such a run.

    Raises:
        ConfigError: this version of Lightning was not tested.
    """

    def __init__(self, protocol: str | None, settings: Mapping[str, Any]) -> None:
        version = lightning.__version__
        if not version.startswith(tuple(f"{tested}." for tested in _VERSIONS)):
            raise ConfigError(
                f"PacelineStrategy is written for lightning {' and '.join(_VERSIONS)}, but this is "
                f"{version}: pip install 'lightning=={_VERSIONS[-1]}.*'"
            )
        self.protocol = protocol
        self.settings = settings

    def launcher(self, devices: Sequence[torch.device]) -> "_Launcher | None":
        """The launcher for one worker per device; None: there is no run, only this process.

        Raises:
            ConfigError: one worker cannot follow the protocol.
        """
        if len(devices) > 1 or self.settings:
            return ScriptLauncher(self, devices)
        parse(self.protocol or "full-sync", 1)
        return None

    def run(self, devices: Sequence[torch.device]) -> None:
        """Run the script again, in one worker per device, until all have ended.

        Raises:
            ConfigError: a setting is not possible.
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
        trainer.callbacks, trainer.loggers = [], []  # this process trains nothing
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
    """The script or module that ``python`` runs.

    Raises:
        ConfigError: it is neither.
    """
    main = sys.modules["__main__"]
    arguments = tuple(sys.argv[1:])
    if main.__spec__ is not None:
        name = main.__spec__.name.removesuffix(".__main__")
        return ScriptProgram(path=name, args=arguments, is_module=True)
    path = getattr(main, "__file__", None)
    if path is None:
        raise ConfigError(
            "PacelineStrategy starts the script again in every worker, but there is no script "
            "here; write it to a file: python train.py"
        )
    return ScriptProgram(path=str(Path(path).resolve()), args=arguments)


# -- what is refused -----------------------------------------------------------------------------


def refuse_another_run(starter: Starter, pace: Pace, devices: Sequence[torch.device]) -> None:
    """Raise ConfigError where this worker's run is not the one that the script asks for."""
    context = pace.context
    if context.resume is not None or context.respawn:
        raise ConfigError(
            "the Trainer keeps its own place: "
            + ("--resume" if context.resume is not None else "--respawn")
            + " cannot restore it; resume with trainer.fit(..., ckpt_path=...)"
        )
    if devices and devices[0].type != pace.device.type:
        raise ConfigError(
            f"Trainer(accelerator=...) chose {devices[0].type}, but this run computes on "
            f"{pace.device.type}: paceline launch --device {devices[0].type}"
        )
    if len(devices) not in (1, context.workers):
        raise ConfigError(
            f"Trainer(devices={len(devices)}), but this run has {context.workers} workers: "
            f"paceline launch --workers {len(devices)}"
        )
    if _MARK in os.environ:
        return
    if starter.settings:
        raise ConfigError(
            f"PacelineStrategy was given {', '.join(starter.settings)}, but this run was started "
            "by paceline launch, which has its own settings: give them there"
        )
    asked, runs = starter.protocol, context.protocol
    if asked is not None and str(parse(asked, context.workers)) != str(
        parse(runs, context.workers)
    ):
        raise ConfigError(
            f"PacelineStrategy({asked!r}), but this run was started with {runs}: "
            f"paceline launch --protocol {asked}, or PacelineStrategy(), which takes the run's"
        )


def refuse_what_is_not_carried(trainer: Trainer, layer_sync: object, num_nodes: int) -> None:
    """Raise ConfigError for the first thing that no run supports."""
    if reason := _not_carried(trainer, layer_sync, num_nodes):
        raise ConfigError(f"PacelineStrategy does not support {reason}")


def _not_carried(trainer: Trainer, layer_sync: object, num_nodes: int) -> str:
    """What is not supported, and what to write instead; empty: all is."""
    module = trainer.lightning_module
    if not module.automatic_optimization:
        return (
            "manual optimization (automatic_optimization=False), where the start of a step is "
            "not known; write training_step() to return the loss, or "
            "the loop yourself: README, Four lines"
        )
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        return "training_step(dataloader_iter), which takes batches itself: training_step(batch)"
    if getattr(module, "truncated_bptt_steps", 0) or hasattr(module, "tbptt_split_batch"):
        return (
            "truncated backpropagation (truncated_bptt_steps): split the sequences in the data set"
        )
    for one in trainer.callbacks:
        if isinstance(one, _EDITORS):
            return (
                f"the callback {type(one).__name__}, which changes weights or the optimizer "
                "without the run: leave it out"
            )
    return _option_not_carried(trainer, layer_sync, num_nodes)


def _option_not_carried(trainer: Trainer, layer_sync: object, num_nodes: int) -> str:
    """The Trainer's option that no run supports, and what to do; empty: none."""
    if trainer.precision not in _PRECISIONS:
        return f"precision={trainer.precision!r}: one of {', '.join(_PRECISIONS)}"
    # A float is a part of the epoch, an int is batches; a time is not kept under that name at all.
    every = getattr(trainer, "val_check_interval", "a time")
    is_whole = isinstance(every, float) and every == 1.0
    if not is_whole or trainer.check_val_every_n_epoch is None:
        return (
            f"val_check_interval={every!r}: workers hold one version only between "
            "epochs; validate there: check_val_every_n_epoch=1"
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
            f"accumulate_grad_batches under {pace.context.protocol}, where a worker's last batch "
            "is not known in advance: --protocol full-sync, or a larger batch_size of the "
            "loader, which is shared"
        )
    return _checkpoint_not_carried(trainer, is_in_step) if pace.num_workers > 1 else ""


def _checkpoint_not_carried(trainer: Trainer, is_in_step: bool) -> str:
    """The checkpoints that each worker would decide on by itself; empty: none."""
    pace = trainer.strategy.pace
    for one in trainer.callbacks:
        if isinstance(one, ModelCheckpoint):
            if one._every_n_train_steps and not is_in_step:
                return (
                    f"ModelCheckpoint(every_n_train_steps={one._every_n_train_steps}) under "
                    f"{pace.context.protocol}, where each worker sees other versions and only the "
                    "main one writes: --protocol full-sync, or every_n_epochs=1"
                )
            if one._train_time_interval is not None:
                return (
                    "ModelCheckpoint(train_time_interval=...), which the clock of each worker "
                    "decides: every_n_train_steps under full-sync, or every_n_epochs=1"
                )
    return ""
