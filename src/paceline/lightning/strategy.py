"""Lightning's strategy interface, implemented by a run of Paceline.

    Trainer        setup                fit                               between epochs
       |             |                   |                                     |
    strategy     refuse, loops   prepare, [ optimizer_step ] ...       reduce, barrier, broadcast

Every worker has its own Trainer. Validation and tests run whole in each, so all get the same
metrics without communication; sums over workers are made between epochs. Above 300 lines,
since one object is all of a Trainer's strategy. This module must not know how workers come to be.
"""

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.core.optimizer import _MockOptimizer
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ..engines.torchrun.world import find_rank
from ..errors import ConfigError
from ..script.worker import Pace, current_pace, is_started
from .batches import TrainData, sole_loader
from .loops import FitLoop
from .starting import Starter, refuse_another_run, refuse_what_is_not_carried

_MEANS = ("mean", "avg")
_SAVED, _PREPARED = "Trainer.save_checkpoint", "pre_setup"
"""Lightning's barriers after what the main worker alone does: a checkpoint, prepare_data()."""


class PacelineStrategy(Strategy):
    """Trains a LightningModule with several workers under a protocol.

    ``python train.py`` starts ``Trainer(devices=...)`` workers; the script's process then waits for
    them and ends with them, so only the workers run what follows ``fit``. Under
    ``paceline launch --workers 2 train.py`` it takes part in that run.

    Args:
        protocol: when gradients are combined: ``full-sync``, ``k-batch-async:3``, ...; None: the
            run's, by default full-sync.
        batch: "global": the train loader's batch size is what an update averages; "per-worker": it
            is one mini-batch (what it means under DDP).
        settings: any other setting of a run, as for ``paceline.train`` (``staleness="inverse"``).

    Raises:
        ConfigError: Lightning's version, the protocol or a setting is not supported, or
            the process is a rank of torchrun, srun or mpirun; it is named. Unsupported features of
            a module or a Trainer are refused before the first step.

    Example::

        trainer = Trainer(strategy=PacelineStrategy("k-batch-async:3"), devices=4)
        trainer.fit(module, train_loader, validation_loader)
    """

    strategy_name = "paceline"

    def __init__(
        self, protocol: str | None = None, *, batch: str = "global", **settings: Any
    ) -> None:
        super().__init__()
        if batch not in ("global", "per-worker"):
            raise ConfigError(f"batch must be 'global' or 'per-worker', got {batch!r}")
        self.pace: Pace = _own_pace()
        self._starter = Starter(protocol, settings)
        self._batch = batch
        self._is_training = False
        """Whether the prepared loader is iterated: workers then do not wait for each other."""
        self._has_prepared = self._is_over = self.is_each_its_own = False
        self._num_words = 0
        # The Trainer fills these.
        self.parallel_devices: list[torch.device] = []
        self.num_nodes = 1
        self._layer_sync: object = None

    # -- who is who -----------------------------------------------------------------------------

    @property
    def is_launched(self) -> bool:
        """Whether this process is a worker of a run, not the script alone."""
        return self.pace.context.run_dir is not None

    @property
    def is_distributed(self) -> bool:
        """Whether ``self.log(..., sync_dist=True)`` uses this strategy."""
        return self.world_size > 1

    @property
    def world_size(self) -> int:
        return self.pace.num_workers if self.is_launched else 1

    @property
    def is_global_zero(self) -> bool:
        return self.pace.is_main

    @property
    def global_rank(self) -> int:
        return 0 if self.pace.is_main else max(1, self.pace.worker)

    @property
    def local_rank(self) -> int:
        return self.global_rank

    @property
    def node_rank(self) -> int:
        return 0

    @property
    def root_device(self) -> torch.device:
        return self.pace.device if self.is_launched else self.parallel_devices[0]

    def set_world_ranks(self) -> None:
        """Set which worker logs and prints; again each epoch, since the main worker may die."""
        rank_zero_only.rank = self.global_rank

    def _configure_launcher(self) -> None:
        devices = self.parallel_devices
        if self.is_launched:
            refuse_another_run(self._starter, self.pace, devices)
        self._launcher = None if self.is_launched else self._starter.launcher(devices)

    # -- what is trained ------------------------------------------------------------------------

    def setup(self, trainer: Trainer) -> None:
        # Batches are handed out to workers, and each evaluation is whole.
        trainer._accelerator_connector.use_distributed_sampler = False
        if trainer.state.fn != TrainerFn.FITTING:
            super().setup(trainer)
            return
        refuse_what_is_not_carried(trainer, self._layer_sync, self.num_nodes)
        trainer.fit_loop = self._take_over(trainer)
        super().setup(trainer)
        own = [each for each in self.optimizers if not isinstance(each, _MockOptimizer)]
        if len(own) != 1:
            raise ConfigError(
                f"configure_optimizers() gave {len(own)} optimizers; PacelineStrategy supports "
                "exactly one: give it all parameters, in groups where they differ"
            )

    def _take_over(self, trainer: Trainer) -> FitLoop:
        """The loops of a run, which replace the Trainer's own."""
        loop = FitLoop(trainer, self.pace)
        loop._data_source = trainer.fit_loop._data_source
        loop.epoch_loop.val_loop = trainer.fit_loop.epoch_loop.val_loop
        return loop

    def setup_precision_plugin(self) -> None:
        super().setup_precision_plugin()
        plugin = self.precision_plugin
        plugin.clip_grad_by_norm = self._clip_norm
        plugin.clip_grad_by_value = self._clip_value

    def _clip_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        self.pace.clip_grad_norm_([*self.precision_plugin.main_params(optimizer)], clip_val)

    def _clip_value(self, optimizer: Optimizer, clip_val: float) -> None:
        self.pace.clip_grad_value_([*self.precision_plugin.main_params(optimizer)], clip_val)

    def process_dataloader(self, dataloader: object) -> object:
        trainer = self.lightning_module.trainer
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        if not is_fitting or trainer.validating or trainer.sanity_checking:
            return dataloader
        parts = self.pace.context.parts if self._batch == "per-worker" else 1
        return TrainData(sole_loader(dataloader), parts)

    def prepare(self, loader: DataLoader[Any]) -> Any:
        """Prepare all objects; returns the loader for the loop.

        Raises:
            ConfigError: it is called a second time, or something is not supported.
        """
        if self._has_prepared:
            raise ConfigError(
                "the Trainer begins to fit a second time, but a run trains once: leave out "
                "LearningRateFinder and BatchSizeFinder, or train longer with more max_epochs"
            )
        schedulers = [config.scheduler for config in self.lr_scheduler_configs]
        module, optimizer = self.lightning_module, self.optimizers[0]
        _, _, prepared, *_ = self.pace.prepare(
            module, optimizer, loader, *schedulers, batch=self._batch
        )
        self._has_prepared = True
        if self.is_launched:  # the launcher handles signals
            module.trainer._signal_connector.teardown()
        return prepared

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: object = None,
        **kwargs: Any,
    ) -> Any:
        """Compute the gradient by the closure, then push it; the step calls nothing again."""
        loss = self.precision_plugin._wrap_closure(self.lightning_module, optimizer, closure)
        optimizer.step(**kwargs)
        return loss

    def begin_epoch(self) -> None:
        """Begin an epoch, in which each worker goes at its own pace."""
        self._is_training = True
        self.set_world_ranks()

    def end_epoch(self) -> None:
        """End the epoch: all workers call this, and then hold one version."""
        self._is_training = False
        self.pace.sum(0)

    def end(self) -> None:
        """End training: workers communicate no more."""
        self._is_training, self._is_over = False, True

    # -- among workers --------------------------------------------------------------------------

    @property
    def _can_sum(self) -> bool:
        is_apart = self._is_training or self._is_over or not self._has_prepared
        return not is_apart and self.world_size > 1

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over all workers between epochs; inside an epoch return the worker's own value.

        Likewise in validation, which every worker runs on all samples.
        """
        trainer = self.lightning_module.trainer
        if trainer.evaluating or trainer.sanity_checking:
            return tensor
        return self._reduced(tensor, str(getattr(reduce_op, "name", reduce_op) or "mean").lower())

    def _reduced(self, tensor: Any, name: str) -> Any:
        if not isinstance(tensor, Tensor) or not self._can_sum or self.is_each_its_own:
            return tensor
        if name not in (*_MEANS, "sum"):
            raise ConfigError(
                f"a value cannot be reduced over workers by {name!r}; use 'mean' or 'sum', or "
                "leave out sync_dist=True: validation gives every worker the same"
            )
        total = self.pace.sum(tensor.detach().cpu().double())
        if name in _MEANS:
            total = total / self.pace.sum(1)
            if not tensor.is_floating_point():  # numbers of samples, which differ between workers
                return total.to(tensor.device)
        return total.to(tensor)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Vote over all workers; inside an epoch each decides for itself."""
        if not self._can_sum:
            return decision
        votes = self.pace.sum(decision)
        return votes == self.pace.sum(1) if all else votes > 0

    def barrier(self, name: str | None = None) -> None:
        """Wait for all workers, but not inside an epoch: only the main worker writes checkpoints.

        After training all wait where a file is saved or data are prepared, and may then read it.
        """
        is_written = self._is_over and self.world_size > 1
        is_written &= name == _SAVED or (name == _PREPARED and self._prepares_data())
        if self._can_sum:
            self.pace.sum(0)
        elif is_written or not self._has_prepared:  # prepare_data() is the main worker's
            with self.pace.once():
                pass

    def _prepares_data(self) -> bool:
        """Whether the module or its data module prepares data; if neither does, none waits."""
        module = self.lightning_module
        sources = [module, module.trainer.datamodule] if module is not None else []
        return any(is_overridden("prepare_data", one) for one in sources if one is not None)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Send the main worker's value to all as JSON; inside an epoch each keeps its own.

        Raises:
            ConfigError: JSON cannot hold the value, or ``src`` is not the main worker.
        """
        if self._is_training or self._is_over or self.world_size == 1:
            return obj
        text = _as_json(obj)
        if src != 0:
            raise ConfigError(f"broadcast(src={src}): only the main worker broadcasts, src=0")
        self._num_words += 1
        path = Path(self.pace.context.run_dir or ".") / "logs" / f"word-{self._num_words}.json"
        with self.pace.once() as is_first:
            if is_first:
                path.write_text(text)
        return json.loads(path.read_text())

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Stack the tensors of all live workers, between epochs.

        Raises:
            ConfigError: inside an epoch, where workers are at different batches.
        """
        if self.world_size == 1:
            return tensor
        if not self._has_prepared or self._is_over:  # all evaluate the same samples
            return torch.stack([tensor] * self.world_size)
        if not self._can_sum or sync_grads:
            raise ConfigError(
                "all_gather() waits for all workers, which are at different batches inside an "
                "epoch; gather in on_train_epoch_end() or in validation, without sync_grads"
            )
        slots = torch.zeros(self.world_size, *tensor.shape, dtype=torch.float64)
        slots[self.pace.worker] = tensor.detach()
        is_here = torch.zeros(self.world_size, dtype=torch.float64)
        is_here[self.pace.worker] = 1
        gathered: Tensor = self._reduced(slots, "sum")[self._reduced(is_here, "sum") > 0].to(tensor)
        return gathered

    # -- and the rest ---------------------------------------------------------------------------

    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    def teardown(self) -> None:
        with contextlib.suppress(AttributeError):  # the methods of the class are back then
            del self.precision_plugin.clip_grad_by_norm, self.precision_plugin.clip_grad_by_value
        own: list[Optimizer] = self._optimizers
        self.optimizers = []  # their state is the run's now
        super().teardown()
        self.optimizers = own


def _own_pace() -> Pace:
    """This process's part in its run. ConfigError: it is a rank of another launcher."""
    rank = None if is_started() else find_rank(os.environ)
    if rank is not None:
        raise ConfigError(
            f"PacelineStrategy does not support torchrun, srun or mpirun, and this is "
            f"rank {rank.rank} of {rank.size}: start the script by python, with "
            f"Trainer(devices={rank.size}), or by paceline launch --workers {rank.size} SCRIPT"
        )
    return current_pace()


def _as_json(obj: object) -> str:
    """The object as JSON. ConfigError: reading it would give something else."""
    with contextlib.suppress(TypeError, ValueError):
        text = json.dumps(obj)
        if repr(json.loads(text)) == repr(obj):
            return text
    raise ConfigError(
        f"broadcast() sends JSON, which cannot hold a {type(obj).__name__}: send strings, "
        "numbers, lists, and dicts with string keys"
    )
