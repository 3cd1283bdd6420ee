"""Compute a model in parts, one after the other, each on its worker: a pipeline.

    model(x)          -> meet -> micro-batches through all parts -> outputs; one node of a graph
    loss.backward()   -> that node -> meet -> gradients through all parts
    model.parameters()   the same objects; those of other parts are absent (replica/absent.py)

This module must not know the loop. Above 300 lines, since a pass and the reasons to refuse it are
read together.
"""

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import ConfigError
from ..replica.absent import forget
from ..replica.own_gradients import register
from ..replica.seeding import kept_random_state
from ..splits.parts import ModelPart
from .base import STALE, OwnTensors, SpreadModel
from .batch_norm import NormStatistics, refuse_batch_norm, training_batch_norms
from .borders import used_tensors
from .chunks import TensorShape, chunk_rows, chunks_of
from .cut import BUFFER_CHANGES, ModelCut
from .group import SplitGroups, tell_all
from .meeting import Intent, PartTask
from .modes import in_mode, module_mode
from .pipeline import PartRunner, Passed

if TYPE_CHECKING:
    from .layered import ColumnRunner

_MUCH_WORSE = 0.85
_MOST_BITS = 62
_FAR, _CLOSE = 1e4, 1e-2
"""To try a hook: how much larger one gradient is than another, and how close sums must be."""
_NOTHING = Intent(PartTask.STEP_END)
ChunksOfOwn = dict[int, list[Tensor]]
"""The tensors of each of a worker's micro-batches."""


class PipelinedModel(SpreadModel):
    """One worker's side of a model in parts.

    Args:
        module: the script's whole module; this worker gives up the parameters of other parts.
        optimizers: over the module; they keep this part's parameters and state.
        num_samples: returns the samples of this worker's mini-batch, 0 where it has none.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        cut: ModelCut,
        groups: SplitGroups,
        num_samples: Callable[[], int],
    ) -> None:
        super().__init__(module, optimizers, groups, num_samples)
        self.cut, self.note, self.sent_bytes = cut, cut.note, cut.sent_bytes
        self.norms = self._norm_statistics()
        self._pipeline = self._make_runner()
        self._passes: dict[int, Passed] = {}
        self._num_passes = 0
        """Counted over all steps, so that a pass of an earlier step is not taken for a new one."""
        self._used: dict[int, list[list[int]]] = {}
        self._is_back = False
        self._lost_s = 0.0
        self._anchor = torch.zeros((), requires_grad=True)
        self._hold(optimizers)
        self._stand_in(optimizers)
        self.buffers = list(module.buffers())
        number_of = {id(buffer): number for number, buffer in enumerate(self.buffers)}
        self._owners = [
            (owner, key, number_of[id(buffer)])
            for owner in module.modules()
            for key, buffer in owner._buffers.items()
            if buffer is not None
        ]
        self.mark_buffers()
        self._layers = [(name, layer) for name, layer in module.named_modules() if name]
        cut.code.retire()

    def _make_runner(self) -> "PartRunner | ColumnRunner":
        return PartRunner(self._modules(), self.groups.copy, self.cut.borders, self.norms)

    def _own_parts(self) -> tuple[ModelPart, ...]:
        return self.cut.parts[self.groups.part :: self.groups.copy.size]

    def _modules(self) -> list[nn.Module]:
        """Return the modules of this worker's parts."""
        return [part.module for part in self._own_parts()]

    def _norm_statistics(self) -> NormStatistics:
        own = {name for part in self._own_parts() for name in part.buffers}
        names = [name for part in self.cut.parts for name in part.buffers]
        of_norms = [name for name in names if name.rpartition(".")[0] in self.cut.batch_norms]
        layers = {name.rpartition(".")[0] for name in of_norms if name in own}
        return NormStatistics(
            [self._module.get_submodule(name) for name in layers],
            [(self._module.get_buffer(name), name in own) for name in of_norms],
        )

    def _hold(self, optimizers: Sequence[Optimizer]) -> None:
        """Keep this worker's parameters, and give up all others."""
        named = dict(self._module.named_parameters())
        holders = self._holders(named)
        self.own = self._own_tensors(named, holders)
        tied = sorted(name for name, workers in holders.items() if len(workers) > 1)
        self.shared_sizes = [(name, named[name].dtype, named[name].numel()) for name in tied]
        here = self.groups.part
        held = {name for name, workers in holders.items() if here in workers}
        self.shared = frozenset(held & set(tied))
        self.counted = frozenset(name for name in held if holders[name][0] == here)
        self._give_up_others(optimizers, named, holders)
        self._tied = sorted(self.shared)
        for number, name in enumerate(self._tied):
            register(named[name], self._arrived, number)
        refuse_uneven_hooks(self.own.named_parameters())
        _refuse_counted_rows(self._module)

    def _holders(self, named: dict[str, nn.Parameter]) -> dict[str, list[int]]:
        """Return the workers that hold each parameter; an unused one is held by the first."""
        size = self.groups.copy.size
        parts = [(number % size, part) for number, part in enumerate(self.cut.parts)]
        return {
            name: sorted({worker for worker, part in parts if name in part.parameters}) or [0]
            for name in named
        }

    def _own_tensors(
        self, named: dict[str, nn.Parameter], holders: dict[str, list[int]]
    ) -> OwnTensors:
        here, buffers = self.groups.part, dict(self._module.named_buffers())
        used = {name for part in self.cut.parts for name in part.buffers}
        parts = self._own_parts()
        held = {name for part in parts for name in part.buffers}
        if here == 0:
            held |= buffers.keys() - used
        return OwnTensors(
            [(name, parameter) for name, parameter in named.items() if here in holders[name]],
            [(name, buffer) for name, buffer in buffers.items() if name in held],
            parts[0].module if len(parts) == 1 else nn.ModuleList(part.module for part in parts),
        )

    def _give_up_others(
        self,
        optimizers: Sequence[Optimizer],
        named: dict[str, nn.Parameter],
        holders: dict[str, list[int]],
    ) -> None:
        held = {id(parameter) for parameter in self.own.parameters()}
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["params"] = [p for p in group["params"] if id(p) in held]
            for parameter in [p for p in optimizer.state if id(p) not in held]:
                del optimizer.state[parameter]
        for name, parameter in named.items():
            if id(parameter) not in held:
                forget(parameter, name, f"on worker {self.groups.members[holders[name][0]]}")

    def _ended(self) -> None:
        self._passes.clear()

    def _divided_worse(self) -> tuple[str, float] | None:
        """Compare how long the parts were busy with the balance that the cut was made for."""
        busy = tell_all(self.groups.copy, self._pipeline.busy_s)
        self._pipeline.busy_s = 0.0
        mean = sum(busy) / len(busy)
        if not min(busy) or mean >= _MUCH_WORSE * self.cut.balance * max(busy):
            return None
        self._lost_s += max(busy) - mean / self.cut.balance
        shares = " | ".join(f"{part_s / sum(busy):.0%}" for part_s in busy)
        message = (
            f"parts were busy {shares} of the time: balance {mean / max(busy):.0%}, predicted "
            f"{self.cut.balance:.0%}"
        )
        return (message, self._lost_s) if self.groups.seat == 0 else None

    def _checked(self, args: Sequence[Any], kwargs: Iterable[str] = ()) -> tuple[int, ChunksOfOwn]:
        """Check a call of the model; return the rows of the mini-batch, and its micro-batches.

        Args:
            kwargs: names of keyword arguments.

        Raises:
            ConfigError: the call does not fit the inputs that the model was cut for.
        """
        shapes = self.cut.borders[0]
        is_right = len(args) == len(shapes) and all(
            isinstance(x, Tensor) and x.dtype is shape.dtype and x.ndim == len(shape.fixed)
            for x, shape in zip(args, shapes, strict=True)
        )
        if kwargs or not is_right:
            raise ConfigError(
                f"a split model was cut for {len(shapes)} tensors of {[s.dtype for s in shapes]}, "
                f"but is called with {[getattr(x, 'dtype', type(x).__name__) for x in args]}"
                f"{' and ' + ', '.join(kwargs) if kwargs else ''}: call it as in the first batch"
            )
        if any(x.requires_grad for x in args):
            raise ConfigError(
                "a split model's inputs require gradients, which are not sent back to them"
            )
        if torch.is_autocast_enabled("cpu"):
            raise ConfigError("autocast is not supported with a split model: leave it out")
        if not (rows := len(args[0])):
            raise ConfigError(
                "a split model is called with no row: skip the call in all workers if there is "
                "none, if len(x): ..., or use --split data"
            )
        self._check_rows(args, rows)
        chunked = [torch.split(x, self._sizes(rows)) for x in args]
        return rows, {number: list(xs) for number, xs in enumerate(zip(*chunked, strict=True))}

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the model on this worker's rows, together with all workers of the copy."""
        rows, own_inputs = self._checked(args, kwargs)
        is_tracked = torch.is_grad_enabled()
        keeps = is_tracked and self._num_samples() > 0  # elsewhere nothing can go back
        doing = PartTask.FORWARD if keeps else PartTask.LOOK
        intents = self._meet(self._called(doing, rows, args, self.cut.borders[0]))
        number, chunks = self._run(intents, own_inputs, keeps=keeps)
        outputs = [torch.cat(ys) for ys in zip(*(chunks[i] for i in sorted(chunks)), strict=True)]
        if is_tracked:
            outputs = list(_Computed.apply(self, number, self._anchor, *outputs))  # type: ignore[no-untyped-call]  # torch's has no types
        return torch.utils._pytree.tree_unflatten(outputs, self.cut.form)

    def _sizes(self, rows: int) -> list[int]:
        """Return the rows of each micro-batch of this worker's mini-batch."""
        return chunk_rows(rows, self.cut.shares[self.groups.part])

    def _called(
        self, doing: PartTask, rows: int, args: Sequence[Tensor], shapes: Sequence[TensorShape]
    ) -> Intent:
        """Return the intent to call the model, with the first argument of another size, if any."""
        odd = (-1, 0, 0)
        for number, (x, shape) in enumerate(zip(args, shapes, strict=True)):
            if (dim := shape.other_size(x)) is not None:
                odd = (number, dim, x.shape[dim])
                break
        return Intent(doing, -1, rows, self._num_samples(), self._mode(), self._seed(), *odd)

    def _seed(self) -> int:
        """Return a seed for random numbers that all workers draw alike; below 0: none are drawn."""
        return -1

    def _check_rows(self, args: Sequence[Tensor], rows: int) -> None:
        """Raise ConfigError where micro-batches of the arguments, or of a layer, are impossible."""
        if any(len(x) != rows for x in args):
            raise ConfigError(
                f"a split model is called with tensors of {[len(x) for x in args]} rows: its "
                "inputs have a row for each sample"
            )
        fixed = self.cut.fixed_rows
        if fixed is not None and set(self._sizes(rows)) != {fixed}:
            raise ConfigError(
                f"torch.export traced this model for micro-batches of {fixed} samples, and {rows} "
                "samples cannot be cut into these: use drop_last=True and a batch that all workers "
                "share evenly, or --split data"
            )
        norms = training_batch_norms(self._module)
        thawed = [name for name in norms if name not in self.cut.batch_norms]
        refuse_batch_norm(thawed, instead="data")
        for name in self.cut.frozen:
            if self._module.get_submodule(name).training:
                raise ConfigError(BUFFER_CHANGES.format(name))
        for name, layer in self._layers:
            if layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks:
                raise ConfigError(
                    f"layer {name!r} has a hook, which would get the micro-batches of all workers, "
                    "in one of them only: remove it, or use --split data or shard"
                )
        self.cut.code.check()

    def _run(
        self, intents: Sequence[Intent], own_inputs: ChunksOfOwn, *, keeps: bool
    ) -> tuple[int, ChunksOfOwn]:
        """Run a forward pass with all workers.

        Args:
            own_inputs: this worker's micro-batches; empty: it only computes its part for others.

        Returns:
            The number of the pass, -1 without ``keeps``, and the outputs of ``own_inputs``.
        """
        doing = PartTask.FORWARD if keeps else PartTask.LOOK
        callers = only(doing, intents)
        chunks = chunks_of([intent.rows for intent in callers], self.cut.shares, in_turns=True)
        with in_mode(self._module, next(intent.mode for intent in callers if intent.doing)):
            outputs, passed = self._pipeline.forward(chunks, own_inputs, keeps=keeps)
        if passed is None:
            return -1, outputs
        number, self._num_passes = self._num_passes, self._num_passes + 1
        self._passes[number] = passed
        self._note_shares(intents)
        return number, outputs

    def _serve(self, doing: PartTask, intents: Sequence[Intent]) -> None:
        """Compute this part for others."""
        if doing is not PartTask.BACKWARD:
            self._run(intents, {}, keeps=doing is PartTask.FORWARD)
            return
        passed = self._passed(max(intent.number for intent in intents if intent.doing is doing))
        self._run_back(passed, intents, [None] * len(self.cut.borders[-1]))

    def _mode(self) -> int:
        return module_mode(self._module)

    def backward(self, number: int, gradients: Sequence[Tensor | None]) -> None:
        """Run the backward pass of a forward pass.

        Args:
            number: of the forward pass.
            gradients: of this worker's outputs.
        """
        self._refuse_outside()
        passed = self._passed(number)
        outputs = sum(1 << at for at, gradient in enumerate(gradients) if gradient is not None)
        if len(gradients) > _MOST_BITS:
            outputs = -1
        intents = self._meet(Intent(PartTask.BACKWARD, number, outputs))
        self._run_back(passed, intents, gradients)

    def _passed(self, number: int) -> Passed:
        """Return a forward pass; raise ConfigError where it can have no backward pass any more."""
        if (passed := self._passes.get(number)) is None:
            raise ConfigError(STALE)
        if not passed.kept:
            raise ConfigError(
                "backward() was called twice on an output of a split model, which is kept for one "
                "call: add up the losses, and call it once"
            )
        return passed

    def _run_back(
        self, passed: Passed, intents: Sequence[Intent], gradients: Sequence[Tensor | None]
    ) -> None:
        """Run a backward pass with all workers, with gradients weighed by the worker's share."""
        assert self._shares is not None
        share = self._shares[self.groups.part]
        rows = [chunk.rows for chunk in passed.chunks if chunk.owner == self.groups.part]
        outputs = functools.reduce(
            operator.or_, (intent.rows for intent in only(PartTask.BACKWARD, intents))
        )
        self._pipeline.used = used = self._used_of(outputs)
        chunked = []
        for number in used[-1]:
            shape, gradient = self.cut.borders[-1][number], gradients[number]
            weighed = shape.empty(sum(rows)).zero_() if gradient is None else gradient * share
            chunked.append(torch.split(weighed, [shape.length(size) for size in rows]))
        own_gradients = {
            number: [chunks[number] for chunks in chunked] for number in range(len(rows))
        }
        with self._going_back():
            self._pipeline.backward(passed, own_gradients)

    @contextmanager
    def _going_back(self) -> Iterator[None]:
        """A block in which gradients come through ``model(x)``."""
        self._is_back = True
        with torch.enable_grad(), self._through_model():
            yield
        self._is_back = False

    def _used_of(self, outputs: int) -> list[list[int]]:
        """Return `used_tensors` for those outputs that have gradients, one bit each."""
        if outputs not in self._used:
            self._used[outputs] = used_tensors(self.cut.borders, self.cut.flow, outputs)
        return self._used[outputs]

    def mark_buffers(self) -> None:
        self._marks = self._buffer_marks()

    def _buffer_marks(self) -> list[tuple[int, int]]:
        """Return a mark per buffer, which changes as it is written or its memory is replaced.

        The run itself moves those of this part; ``HeldMemory`` writes into them what replaced them.
        Running statistics have the same mark always (batch_norm.py).
        """
        own = {id(buffer) for buffer in self.own.buffers()}
        statistics = {id(buffer) for buffer, _ in self.norms.buffers}
        return [
            (0, 0)
            if id(buffer) in statistics
            else (buffer._version, buffer.data_ptr() * (id(buffer) not in own))
            for buffer in self.buffers
        ]

    def _take_buffers(self) -> None:
        """Copy buffers that the script has replaced into the tensors that parts compute with.

        Raises:
            ConfigError: a new one has another type or shape.
        """
        for owner, key, number in self._owners:
            old, new = self.buffers[number], owner._buffers.get(key)
            if new is old:
                continue
            if new is not None and (new.dtype, new.shape) == (old.dtype, old.shape):
                with torch.no_grad():
                    old.copy_(new)
                owner._buffers[key] = old
            elif key not in owner._non_persistent_buffers_set:  # those are caches of any size
                raise ConfigError(
                    f"buffer {self._names[id(old)]!r} was replaced after prepare(), but parts of a "
                    "split model keep the old one: keep its type and shape, or use --split data"
                )

    def _changed_buffers(self) -> int:
        self._take_buffers()
        marks = self._buffer_marks()
        if marks == self._marks:
            return 0
        pairs = enumerate(zip(marks, self._marks, strict=True))
        changed = sum(1 << number for number, (now, before) in pairs if now != before)
        return changed if len(marks) <= _MOST_BITS else -1

    def _arrived(self, number: int, _: Tensor) -> None:
        """Check the gradient of a tied parameter, as it arrives."""
        if not self._is_back:
            raise ConfigError(
                f"parameter {self._tied[number]!r} gets a gradient that does not come through "
                "model(x), which each part that has it would add: let the model return what the "
                "loss needs of it, use weight_decay, or --split data"
            )


def only(doing: PartTask, intents: Sequence[Intent]) -> list[Intent]:
    """Return the intents of workers that do a task; those of others are empty."""
    return [intent if intent.doing is doing else _NOTHING for intent in intents]


def refuse_uneven_hooks(named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Raise ConfigError where a parameter's hook is not linear in the gradient."""
    for name, parameter in named:
        for hook in list((parameter._backward_hooks or {}).values()):
            if not _keeps_sums(hook, parameter):
                raise ConfigError(
                    f"parameter {name!r} has a hook that is not linear, which would get the "
                    "gradient of each micro-batch instead of the batch's: clip by "
                    "pace.clip_grad_value_ or pace.clip_grad_norm_, or use --split data"
                )


def _refuse_counted_rows(module: nn.Module) -> None:
    """Raise ConfigError where gradients depend on how often an index is in a mini-batch."""
    for name, layer in module.named_modules():
        if getattr(layer, "scale_grad_by_freq", False):
            raise ConfigError(
                f"{name!r} has scale_grad_by_freq, and would count indices in each micro-batch "
                "instead of the batch: leave it out, or use --split data or layer"
            )


def _keeps_sums(hook: Callable[[Tensor], Tensor | None], parameter: Tensor) -> bool:
    """Whether a hook of a sum of two gradients returns the sum of what it returns for each."""

    def after(gradient: Tensor) -> Tensor:
        result = hook(copy := gradient.clone())
        return copy if result is None else result

    with kept_random_state(), torch.no_grad():
        a, b = torch.randn_like(parameter), torch.randn_like(parameter)
        try:
            of_sum, sum_of = after(_FAR * a + b), _FAR * after(a) + after(b)
        except Exception:  # a script's own; it may need state that exists only in training
            return True
    return bool(torch.allclose(of_sum, sum_of, rtol=_CLOSE, atol=_CLOSE))


class _Computed(torch.autograd.Function):
    """The whole model as one autograd node, whose outputs are a worker's."""

    @staticmethod
    def forward(
        ctx: Any, spread: PipelinedModel, number: int, anchor: Tensor, *outputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.spread, ctx.number = spread, number
        ctx.set_materialize_grads(False)
        integers = [y for y in outputs if not (y.is_floating_point() or y.is_complex())]
        ctx.mark_non_differentiable(*integers)
        return tuple(y.detach() for y in outputs)  # no views, which must not be changed in place

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        ctx.spread.backward(ctx.number, gradients)
        return (None, None, None, *(None for _ in gradients))
