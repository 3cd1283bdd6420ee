"""Compute a model whose parameters lie in pieces on all workers, each on its own batch.

    shard:1   optimizer state in pieces        parameters whole, gradients until backward() is over
    shard:2   and gradients                    a unit's are reduced as soon as it has all of them
    shard:3   and parameters                   a unit is gathered before it computes

    forward    gather u1 | compute | free    gather u2 | compute | free     ...
    backward   gather u2 | compute | reduce, free    gather u1 | compute | reduce, free

These are the three stages of S. Rajbhandari et al., "ZeRO", 2020, section 5. All workers go through
units in the same order, which the first pass of each kind fixes: a worker without a mini-batch
gives its pieces in that order, and a worker that reaches another unit raises an error. Gradients
are weighed by the samples of their mini-batch before they leave their worker, so sums over workers
are means. Above 300 lines, since a worker that serves others repeats all that a pass does.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import ConfigError
from ..plan import format_bytes
from ..store.optimizer_copy import is_elementwise
from .base import STALE, OwnTensors, SpreadModel
from .group import SplitGroups
from .meeting import Intent, PartTask
from .units import (
    ParameterPiece,
    ParameterUnit,
    cut_state,
    find_units,
    refuse_hidden,
    used_outside,
    without_views,
)

_GATHER, _REDUCE, _END = 0, 1, 2
_ELSEWHERE = (
    "backward() reaches parameters otherwise than through what model(x) returned, but they are in "
    "pieces: let the loss use the model's output, too, in the same backward(), or use --split data"
)


class ShardedModel(SpreadModel):
    """One worker's side of a model in pieces.

    Args:
        module: the script's whole module; only this worker's pieces of it are kept.
        optimizers: over the module; they keep the pieces.
        stage: 1, 2 or 3.
        look: calls the module as the script will.
        num_samples: returns the samples of this worker's mini-batch, 0 where it has none.

    Raises:
        ConfigError: an optimizer needs whole parameters, or one is not contiguous.
    """

    sums_buffers = True

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        groups: SplitGroups,
        stage: int,
        look: Callable[[], object],
        num_samples: Callable[[], int],
    ) -> None:
        super().__init__(module, optimizers, groups, num_samples)
        for optimizer in optimizers:
            if not is_elementwise(optimizer):
                raise ConfigError(
                    f"{type(optimizer).__name__} may need whole parameters, but shards are pieces "
                    "of them: use torch's own SGD or Adam (or the like), or --split network"
                )
        self._stage, self._compute = stage, module.forward
        self._orders: dict[PartTask, list[tuple[int, int]]] = {}
        self._order: list[tuple[int, int]] | None = None
        self._num_events, self._is_recording = 0, False
        self._is_back, self._is_stale, self._num_passes = False, False, 0
        self._num_trained: list[int] = []
        """Trained parameters of each unit, in the last backward pass."""
        size = sum(parameter.nbytes for parameter in module.parameters())
        self._units = find_units(module, used_outside(module, look), groups.copy)
        self._hold_pieces(optimizers)
        self._watch()
        for unit in self._units:
            unit.free() if stage == 3 else unit.hide()
        self._stand_in(optimizers)
        self._describe(size)
        with torch.no_grad():
            look()  # fixes the order of looks

    def _hold_pieces(self, optimizers: Sequence[Optimizer]) -> None:
        """Keep this worker's pieces, which it steps from now on."""
        pieces = {piece.name: piece for unit in self._units for piece in unit.pieces}
        names = [name for name, _ in self._module.named_parameters()]
        self.own = OwnTensors(
            [(name, pieces[name].held) for name in names if name in pieces],
            list(self._module.named_buffers()),
            self._module,
        )
        self.starts = {name: piece.start for name, piece in pieces.items()}
        self.counted = frozenset(pieces)
        self._hand_over(optimizers, pieces)

    def _describe(self, num_bytes: int) -> None:
        """Fill in the plan's note and bytes.

        Args:
            num_bytes: of all parameters.
        """
        others = self.groups.copy.size - 1
        self.sent_bytes = (3 if self._stage == 3 else 2) * others * num_bytes
        what = {1: "optimizer state", 2: "gradients and optimizer state", 3: "all"}[self._stage]
        largest = max(unit.num_bytes for unit in self._units)
        self.note = (
            f"shard:{self._stage}: {what} of {format_bytes(num_bytes)} of parameters in "
            f"{others + 1} pieces, {len(self._units)} units of at most {format_bytes(largest)}"
        )

    def _hand_over(
        self, optimizers: Sequence[Optimizer], pieces: dict[str, ParameterPiece]
    ) -> None:
        """Let optimizers step pieces, with their state of these pieces."""
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                pairs = [(p, pieces.get(self._names[id(p)])) for p in group["params"]]
                group["params"] = [piece.held for _, piece in pairs if piece is not None]
                for parameter, piece in pairs:
                    state = optimizer.state.pop(parameter, None)
                    if state and piece is not None:
                        optimizer.state[piece.held] = {
                            key: cut_state(value, parameter, piece) for key, value in state.items()
                        }

    @contextmanager
    def _in_order(self, task: PartTask) -> Iterator[None]:
        """A block with a pass, whose events must come in the order of the first such pass."""
        self._begin_order(task)
        yield
        self._end_order(task)

    def _begin_order(self, task: PartTask) -> None:
        self._is_recording = task not in self._orders
        self._order, self._num_events = self._orders.get(task, []), 0

    def _end_order(self, task: PartTask) -> None:
        assert self._order is not None
        if self._is_recording:
            self._refuse_other_first(_END, 0)
        elif self._num_events != len(self._order):
            raise self._other_order()
        self._orders[task], self._order = self._order, None

    def _event(self, kind: int, unit: ParameterUnit) -> None:
        """Gather or reduce a unit, as all workers do at this point of the pass."""
        assert self._order is not None
        if self._is_recording:
            self._refuse_other_first(kind, unit.number)
            self._order.append((kind, unit.number))
        elif self._order[self._num_events : self._num_events + 1] != [(kind, unit.number)]:
            raise self._other_order()
        self._num_events += 1
        if kind == _GATHER:
            unit.gather()
        else:
            assert self._shares is not None
            self._reduce(unit, self._shares[self.groups.part])

    def _reduce(self, unit: ParameterUnit, share: float = 1.0) -> None:
        with self._through_model():
            unit.reduce(share)

    def _refuse_other_first(self, kind: int, number: int) -> None:
        """Raise ConfigError where workers are about to do different things in the first pass."""
        event, copy = torch.tensor([kind, number]), self.groups.copy
        events = torch.zeros(2 * copy.size, dtype=torch.int64)
        copy.all_gather(event, events).wait()
        if any(other != event.tolist() for other in events.view(-1, 2).tolist()):
            raise ConfigError(
                f"workers run the layers of {type(self._module).__name__} in different orders (a "
                "layer that is dropped at random?), but all must gather shards in one order: use "
                "--split data, or let the model always compute the same layers"
            )

    def _other_order(self) -> ConfigError:
        return ConfigError(
            f"worker {self.groups.seat} runs the layers of {type(self._module).__name__} in "
            "another order than in its first pass, but all workers must gather shards in one "
            "order: use --split data, or let the model always compute the same layers"
        )

    def _watch(self) -> None:
        """Hook parameters and modules, so that units are gathered, freed and reduced in time."""
        for unit in self._units:
            for parameter in unit.parameters:  # frozen ones, too: they may be trained later
                was_trained = parameter.requires_grad
                register: Any = parameter.requires_grad_(True).register_post_accumulate_grad_hook
                register(partial(self._arrived, unit))
                parameter.requires_grad_(was_trained)
            if unit.module is not None:
                unit.module.register_forward_pre_hook(partial(self._before, unit), prepend=True)
                unit.module.register_forward_hook(partial(self._after, unit))

    def _before(self, unit: ParameterUnit, *_: Any) -> None:
        if self._order is not None and not unit.is_here:
            self._event(_GATHER, unit)

    def _after(self, unit: ParameterUnit, module: nn.Module, args: Any, output: Any) -> Any:
        if self._order is None or self._stage < 3 or self._is_back:
            return None
        if torch.is_grad_enabled():
            refuse_hidden(f"a layer, {type(module).__name__},", output)
        unit.refuse_written()
        output = without_views(output, [unit])
        for leaf in torch.utils._pytree.tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                register: Any = leaf.register_hook
                register(partial(self._before_back, unit))
        unit.free()
        return output

    def _before_back(self, unit: ParameterUnit, gradient: Tensor) -> None:
        if unit.is_here:
            return
        if not self._is_back:
            raise ConfigError(_ELSEWHERE)
        self._event(_GATHER, unit)

    def _arrived(self, unit: ParameterUnit, _: Tensor) -> None:
        if not self._is_back:
            raise ConfigError(_ELSEWHERE)
        unit.num_arrived += 1
        if self._is_back and self._stage > 1 and unit.num_arrived == unit.num_trained:
            if self._stage == 3 and unit.frees_early and unit.module is not None:
                unit.free()
            self._event(_REDUCE, unit)

    # -- passes -----------------------------------------------------------------------------------

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        keeps = torch.is_grad_enabled()
        task = PartTask.FORWARD if keeps else PartTask.LOOK
        intents = self._meet(Intent(task, -1, 0, self._num_samples() if keeps else 0))
        if keeps:
            self._note_shares(intents)
        self._freshen()
        with self._in_order(task):
            for unit in self._own_units():
                self._event(_GATHER, unit)
            if self._stage < 3:
                for unit in self._units:
                    unit.show()
            outputs = self._compute(*args, **kwargs)
            units = list(self._own_units() if self._stage == 3 else self._units)
            outputs = without_views(outputs, units)
            for unit in units:
                unit.refuse_written()
                unit.free() if self._stage == 3 else unit.hide()
        if not keeps:
            return outputs
        refuse_hidden(type(self._module).__name__, outputs)
        leaves, form = torch.utils._pytree.tree_flatten(outputs)
        number, self._num_passes = self._num_passes, self._num_passes + 1
        tensors = [y for y in leaves if isinstance(y, Tensor) and y.requires_grad]
        entered = iter(_Entered.apply(self, number, *tensors)) if tensors else iter(())  # type: ignore[no-untyped-call]  # torch's has no types
        leaves = [
            next(entered) if isinstance(leaf, Tensor) and leaf.requires_grad else leaf
            for leaf in leaves
        ]
        return torch.utils._pytree.tree_unflatten(leaves, form)

    def _own_units(self) -> list[ParameterUnit]:
        """Return the units that the whole model computes with, if they are not always here."""
        return [unit for unit in self._units if unit.module is None and self._stage == 3]

    def _freshen(self) -> None:
        """Gather all units after a step, where parameters are whole."""
        if self._stage < 3 and self._is_stale:
            for unit in self._units:
                unit.gather()
                unit.hide()
            self._is_stale = False

    def stepped(self) -> None:
        self._is_stale = True

    def enter_backward(self, number: int) -> None:
        """Begin a backward pass, as the gradient of a loss enters the model."""
        self._refuse_outside()
        if torch.is_grad_enabled():
            raise ConfigError(
                "backward(create_graph=True), or torch.autograd.grad with it, goes through a split "
                "model, but gradients of its gradients would be of one worker's batch only: use "
                "--split data"
            )
        if self._shares is None:
            raise ConfigError(STALE)
        if self._is_back:  # through an earlier call of the model, by the same backward()
            return
        self._meet(Intent(PartTask.BACKWARD, number))
        self._look_at_trained()
        self._begin_order(PartTask.BACKWARD)
        self._is_back = True
        for unit in self._own_units():
            self._event(_GATHER, unit)
        if self._stage < 3:
            for unit in self._units:
                unit.show()
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(self._leave_backward)

    def _look_at_trained(self) -> None:
        """Forget the order of backward passes if other parameters are trained than in the last."""
        for unit in self._units:
            unit.begin_back()
        before, self._num_trained = self._num_trained, [unit.num_trained for unit in self._units]
        if before != self._num_trained:
            self._orders.pop(PartTask.BACKWARD, None)

    def _leave_backward(self) -> None:
        for unit in self._units:
            if not unit.is_reduced and unit.num_trained:
                self._event(_REDUCE, unit)
        for unit in self._units:
            if self._stage < 3:
                unit.hide()
            elif unit.is_here:
                unit.free()
        self._is_back = False
        self._end_order(PartTask.BACKWARD)

    def _serve(self, doing: PartTask, intents: Sequence[Intent]) -> None:
        """Give pieces, and take sums, in the order in which others go through units."""
        if doing is PartTask.FORWARD:
            self._note_shares(intents)
            self._num_passes += 1
        if doing is not PartTask.BACKWARD:
            self._freshen()
        else:
            self._look_at_trained()
        if doing not in self._orders:
            raise ConfigError(
                "the first batch, or the first since layers were unfrozen, has fewer samples than "
                "there are workers, so the order of layers is not known in all of them: use a "
                "larger batch"
            )
        for kind, number in self._orders[doing]:
            unit = self._units[number]
            if kind == _REDUCE:
                self._reduce(unit)
            else:
                unit.gather()
                unit.free()


class _Entered(torch.autograd.Function):
    """The identity, through which gradients enter the model."""

    @staticmethod
    def forward(
        ctx: Any, spread: ShardedModel, number: int, *outputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.spread, ctx.number = spread, number
        ctx.set_materialize_grads(False)
        return tuple(y.detach() for y in outputs)  # no views, which must not be changed in place

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        ctx.spread.enter_backward(ctx.number)
        return (None, None, *gradients)
