"""The Trainer's loops over epochs and batches, where batches are leases.

    FitLoop        next(pace.epochs)         an epoch begins for all workers, or training is over
      EpochLoop    batch, batch, ...         until no worker has one; then schedulers, validation
        Steps      [ closure -> step ]       the block of pace.step; nothing counts if called off
          batches  next(loader)              a worker learns that an epoch is over when it is

Lightning's own loops know a worker's number of batches before the epoch; here it is unknown, since
a faster worker takes more. So what they do with the last batch (epoch schedulers, validation) comes
after the epoch's end instead, when all workers hold the same version. Only while a group of
accumulated batches is not full, the next one is fetched ahead, inside the block, to step on
what there is. Above 300 lines, since a batch passes through all of these loops. This module must
not know how workers come to be.
"""

from collections import OrderedDict
from collections.abc import Callable, Generator
from typing import Any, cast

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from torch.optim import Optimizer

from ..errors import ConfigError
from ..script.step import Step
from ..script.worker import Pace
from .batches import TrainData, WorkerBatches, refuse_accumulation, sole_loader

_GATHERED = ("value", "cumulated_batch_size", "_forward_cache", "has_reset")
"""Attributes of Lightning's results that a log changes."""
_PLACE = ("_first_loop_iter", "_current_fx")
"""Attributes of Lightning's connector: by them the first log of an epoch begins anew."""
_ENDLESS = 2**31
"""Epochs, where the Trainer goes by steps or time."""


class Steps(_AutomaticOptimization):
    """A step of the Trainer is a step of the run.

    Attributes:
        is_accumulating: whether the current batch, or the last one, makes no step.
    """

    def __init__(self, trainer: Trainer, pace: Pace, batches: WorkerBatches) -> None:
        super().__init__(trainer)
        self._pace = pace
        self._batches = batches
        self._block: Step | None = None
        self._num_accumulated = 0
        self.is_accumulating = False
        self._before = self._at_epoch = 0

    def run(self, optimizer: Optimizer, batch_idx: int, kwargs: OrderedDict[str, Any]) -> Any:
        if self._block is None:
            self._block, self._num_accumulated = self._pace.step(), 0
            self._block.__enter__()
        closure = self._make_closure(kwargs, optimizer, batch_idx)
        self._num_accumulated += 1
        self.is_accumulating = self._num_accumulated < self.trainer.accumulate_grad_batches
        if self.is_accumulating:
            closure()
            if not self._batches.has_more():
                self.is_accumulating = False
                self._optimizer_step(batch_idx, lambda: None)  # the gradients are there
        else:
            self._optimizer_step(batch_idx, closure)
        if not self.is_accumulating:
            self.leave()
        result = closure.consume_result()
        return {} if result.loss is None else result.asdict()

    def leave(self, error: BaseException | None = None) -> bool:
        """End the block; whether the error says that its work is now another worker's."""
        block, self._block = self._block, None
        if block is None:
            return False
        return block.__exit__(type(error) if error else None, error, None)

    def begin_run(self, num_before: int) -> None:
        """Set the number of updates that the Trainer made before this run."""
        self._before = num_before

    def begin_epoch(self) -> None:
        """Start an epoch's counts at the version that all workers hold."""
        self._at_epoch = self._pace.version

    def count(self) -> None:
        """``trainer.global_step`` is the number of updates in the parameters held here."""
        step, version = self.optim_progress.optimizer.step, self._pace.version
        step.total.ready = step.total.completed = self._before + version
        step.current.ready = step.current.completed = version - self._at_epoch

    def _optimizer_step(self, batch_idx: int, closure: Callable[[], Any]) -> None:
        super()._optimizer_step(batch_idx, closure)
        self.count()

    def _make_zero_grad_fn(self, batch_idx: int, optimizer: Optimizer) -> Callable[[], None] | None:
        if self._skip_backward or self._num_accumulated:
            return None

        def zero_grad() -> None:
            self._on_before_zero_grad(optimizer)
            self._optimizer_zero_grad(batch_idx, optimizer)

        return zero_grad


class LogMark:
    """What ``self.log`` had gathered of numbers at one moment, to go back there.

    It is kept by reference, since Lightning replaces its tensors and changes none in place.
    """

    def __init__(self, trainer: Trainer, results: _ResultCollection) -> None:
        self._results, self._connector = results, trainer._logger_connector
        self._place = {name: getattr(self._connector, name) for name in _PLACE}
        self._kept = {
            key: {name: vars(metric)[name] for name in _GATHERED if name in vars(metric)}
            for key, metric in _numbers_in(results).items()
        }

    def restore(self) -> None:
        """Forget what was logged since."""
        for key, metric in _numbers_in(self._results).items():
            if key in self._kept:
                vars(metric).update(self._kept[key])
            else:
                metric.reset()
            metric._computed = None
        vars(self._connector).update(self._place)


def log_nothing(results: _ResultCollection) -> None:
    """Replace the numbers of an epoch before; a mean over workers is still made by all of them."""
    for metric in _numbers_in(results).values():
        is_part_of_mean = metric.meta.sync.should and not metric.has_reset
        num_updates = metric._update_count
        metric.reset()
        if is_part_of_mean:
            metric.has_reset, metric._update_count = False, num_updates  # 0 would warn


def _numbers_in(results: _ResultCollection) -> dict[str, Any]:
    """Its results without metrics of torchmetrics, whose state is the module's own."""
    return {key: metric for key, metric in results.items() if metric.is_tensor}


class EpochLoop(_TrainingEpochLoop):
    """One epoch of the run, in this worker."""

    def __init__(self, trainer: Trainer, pace: Pace, batches: WorkerBatches) -> None:
        epoch_loop = trainer.fit_loop.epoch_loop
        super().__init__(trainer, epoch_loop.min_steps, epoch_loop.max_steps)
        self._pace = pace
        self.steps = self.automatic_optimization = Steps(trainer, pace, batches)
        self.is_cut_by_steps = False
        """Whether ``max_steps`` ends the epoch before its data does."""
        self._has_finished_one = False
        """Whether this worker finished a mini-batch of the epoch."""

    @property
    def _is_training_done(self) -> bool:
        return bool(self.batch_progress.is_last_batch)

    def _num_ready_batches_reached(self) -> bool:
        return bool(self.batch_progress.is_last_batch)

    def _should_accumulate(self) -> bool:
        return self.steps.is_accumulating

    def _should_check_val_fx(self, data_fetcher: WorkerBatches) -> bool:
        return False  # after the epoch

    def on_run_start(self, data_fetcher: WorkerBatches) -> None:
        self.batch_progress.is_last_batch = False
        iter(data_fetcher)
        data_fetcher._start_profiler = self._on_before_fetch
        data_fetcher._stop_profiler = self._on_after_fetch
        self.steps.begin_epoch()
        self._has_finished_one = False

    def run(self, data_fetcher: WorkerBatches) -> None:
        """Train on all batches of this worker, then end the epoch.

        Raises:
            StopIteration: the run was over before the epoch began.
        """
        self.reset()
        self.on_run_start(data_fetcher)
        has_left = False
        while not data_fetcher.done and not has_left:
            try:
                if self._advance(data_fetcher):
                    self.on_advance_end(data_fetcher)
            except StopIteration:
                has_left = not data_fetcher.done
            finally:
                self.on_iteration_done()
            has_left = has_left or self.done
        self.steps.leave()
        data_fetcher.leave()
        if self._pace.is_cut_short:
            raise StopIteration
        self.trainer.strategy.end_epoch()
        self._end_epoch(has_left)

    def _advance(self, data_fetcher: WorkerBatches) -> bool:
        """Train on one batch; False: its work was called off, and it counts and logs nothing."""
        mark = LogMark(self.trainer, self._results)
        try:
            super().advance(data_fetcher)
        except StopIteration:
            raise
        except BaseException as error:  # raised again, unless a trial ends by it
            if not self.steps.leave(error):
                raise
            data_fetcher.forget()
            mark.restore()
            self.batch_progress.reset_on_restart()
            self.batch_progress.total.reset_on_restart()
            self.trainer.lightning_module._current_fx_name = None
            return False
        self.batch_progress.is_last_batch = False
        self._has_finished_one = True
        return True

    def _end_epoch(self, has_left: bool) -> None:
        """End the epoch, when all workers hold one version."""
        trainer, strategy = self.trainer, self.trainer.strategy
        if not self._has_finished_one:
            log_nothing(self._results)
        self.steps.count()
        is_stopped = strategy.reduce_boolean_decision(self._pace.is_stopped, all=False)
        has_left = strategy.reduce_boolean_decision(has_left, all=False)
        trainer.should_stop = strategy.reduce_boolean_decision(trainer.should_stop, all=False)
        is_whole = not (is_stopped or has_left or self.is_cut_by_steps)
        self.batch_progress.is_last_batch = is_whole
        if is_whole:
            self.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        if (is_whole or trainer.should_stop) and self._should_check_val_epoch():
            trainer.validating = True
            call._call_lightning_module_hook(trainer, "on_validation_model_zero_grad")
            self.val_loop.run()
            trainer.training = True


class FitLoop(_FitLoop):
    """The epochs of the run, in this worker."""

    def __init__(self, trainer: Trainer, pace: Pace) -> None:
        old = trainer.fit_loop
        super().__init__(trainer, old.min_epochs, old.max_epochs)
        self._pace = pace
        self._batches = WorkerBatches()
        self.epoch_loop: EpochLoop = EpochLoop(trainer, pace, self._batches)
        self._epochs: Generator[int, None, None] | None = None

    def setup_data(self) -> None:
        if self._combined_loader is not None:
            return
        super().setup_data()
        if self._combined_loader is None:
            return
        self._data_fetcher = self._batches
        self._batches.setup(self._combined_loader)

    def on_run_start(self) -> None:
        """Prepare all objects, and begin."""
        assert self._combined_loader is not None
        data, strategy = self._combined_loader.iterables, self.trainer.strategy
        self._refuse_a_part()
        own = data.loader if isinstance(data, TrainData) else sole_loader(data)
        refuse_accumulation(strategy.pace.context.accumulate)
        self._batches.loader = strategy.prepare(own)
        self.epoch_loop.steps.begin_run(self.epoch_loop.global_step)
        first, asked = self.epoch_progress.current.processed, self._pace.context.epochs
        if asked is not None:
            self.max_epochs = first + asked
        last = self.max_epochs if self.max_epochs not in (None, -1) else _ENDLESS
        self._epochs = cast(Any, self._pace.epochs(range(first, max(first, last))))
        super().on_run_start()

    def _refuse_a_part(self) -> None:
        """Raise ConfigError where a checkpoint of the Trainer's holds the middle of an epoch."""
        ready = self.epoch_loop.batch_progress.current.ready
        if self.restarting and self.restarted_mid_epoch and ready:
            raise ConfigError(
                f"the checkpoint was saved after {ready} batches of an epoch, and only its own run "
                "knew which samples they had; resume from one of an epoch's end: "
                "ModelCheckpoint(every_n_epochs=1)"
            )

    def on_advance_start(self) -> None:
        assert self._epochs is not None
        next(self._epochs)
        super().on_advance_start()  # callbacks may set how many batches a step accumulates
        self._limit()
        self.trainer.strategy.begin_epoch()

    def _limit(self) -> None:
        """Cut the next pass short by ``limit_train_batches`` and ``max_steps``."""
        assert self._combined_loader is not None
        length, most = len(self._batches.loader), self.max_batches
        limits = [int(most)] if most < length else []
        if self.max_steps != -1:
            missing = self.max_steps - self.epoch_loop.global_step
            steps = missing * self.trainer.accumulate_grad_batches
            if not self._pace.context.is_adaptive:
                steps *= self._pace.context.num_steps
            self.epoch_loop.is_cut_by_steps = steps < min([length, *limits])
            limits.append(steps)
        self._batches.loader.most_batches = min(limits, default=None)

    def on_advance_end(self) -> None:
        strategy = self.trainer.strategy
        strategy.is_each_its_own = not self._have_the_same_values()
        super().on_advance_end()
        strategy.is_each_its_own = False
        stop = strategy.reduce_boolean_decision(self.trainer.should_stop, all=False)
        self.trainer.should_stop = stop

    def _have_the_same_values(self) -> bool:
        """Whether all workers log the same values; one that finished no batch has none."""
        if self.trainer.strategy.world_size == 1:
            return True
        results = self.trainer._results  # what was logged in epochs before is in it, too
        own = (
            sum(bool(item.meta.sync.should) for _, item in results.valid_items()) if results else 0
        )
        workers, total, squares = self._pace.sum(torch.tensor([1, own, own * own])).tolist()
        if workers * squares == total * total:
            return True
        self._pace.print(
            "note: a worker finished no mini-batch of this epoch, so the training values of "
            "self.log(..., sync_dist=True) are each worker's own this time"
        )
        return False

    def on_run_end(self) -> None:
        super().on_run_end()
        assert self._epochs is not None
        if self.trainer.should_stop:
            self._epochs.close()
        next(self._epochs, None)
        self.trainer.strategy.end()
