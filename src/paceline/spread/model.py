"""A model in parts behind one another, each on a worker: a pipeline.

    model(x)          -> meet -> micro-batches through all parts -> outputs; one node of a graph
    loss.backward()   -> that node -> meet -> gradients through all parts
    model.parameters()   the same objects; those of other parts are absent (replica/absent.py)

This module must not know the loop. Above 300 lines, since what a pass is refused for stands beside
it.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import ConfigError
from ..replica.absent import forget
from .base import OwnTensors, SpreadModel
from .chunks import TensorShape, chunk_rows, chunks_of
from .cut import BUFFER_CHANGES, ModelCut
from .group import SplitGroups, tell_all
from .meeting import Intent, PartTask
from .modes import in_mode, module_mode, refuse_batch_norm
from .pipeline import PartRunner, Passed

if TYPE_CHECKING:
    from .layered import ColumnRunner

_MUCH_WORSE = 0.85
_NOTHING = Intent(PartTask.STEP_END)
ChunksOfOwn = dict[int, list[Tensor]]
"""The tensors of each of a worker's micro-batches."""


class PipelinedModel(SpreadModel):
    """One worker's side of a model in parts.

    Args:
        module: the script's, whole; its other parts are given up here.
        optimizers: over it; they keep what they have of this part.
        num_samples: of this worker's mini-batch, 0 where it has none.
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
        self._pipeline = self._make_runner()
        self._passes: dict[int, Passed] = {}
        self._lost_s = 0.0
        self._anchor = torch.zeros((), requires_grad=True)
        self._hold(optimizers)
        self._stand_in(optimizers)

    def _make_runner(self) -> "PartRunner | ColumnRunner":
        return PartRunner(self._modules(), self.groups.copy, self.cut.borders)

    def _modules(self) -> list[nn.Module]:
        """Of this worker's parts."""
        own = self.cut.parts[self.groups.part :: self.groups.copy.size]
        return [part.module for part in own]

    def _hold(self, optimizers: Sequence[Optimizer]) -> None:
        """Give up what this worker does not step."""
        named = dict(self._module.named_parameters())
        holders = self._holders(named)
        self.own = self._own_tensors(named, holders)
        every = sorted(name for name, parts in holders.items() if len(parts) > 1)
        self.shared_sizes = [(name, named[name].dtype, named[name].numel()) for name in every]
        here = self.groups.part
        mine = {name for name, parts in holders.items() if here in parts}
        self.shared = frozenset(mine & set(every))
        self.counted = frozenset(name for name in mine if holders[name][0] == here)
        self._give_up_others(optimizers, named, holders)

    def _holders(self, named: dict[str, nn.Parameter]) -> dict[str, list[int]]:
        """The workers that hold each parameter: the first one, where nobody computes with it."""
        size = self.groups.copy.size
        parts = [(number % size, part) for number, part in enumerate(self.cut.parts)]
        return {
            name: sorted({number for number, part in parts if name in part.parameters}) or [0]
            for name in named
        }

    def _own_tensors(
        self, named: dict[str, nn.Parameter], holders: dict[str, list[int]]
    ) -> OwnTensors:
        here, buffers = self.groups.part, dict(self._module.named_buffers())
        used = {name for part in self.cut.parts for name in part.buffers}
        own = self.cut.parts[here :: self.groups.copy.size]
        mine = {name for part in own for name in part.buffers}
        if here == 0:
            mine |= buffers.keys() - used
        return OwnTensors(
            [(name, one) for name, one in named.items() if here in holders[name]],
            [(name, one) for name, one in buffers.items() if name in mine],
            own[0].module if len(own) == 1 else nn.ModuleList(part.module for part in own),
        )

    def _give_up_others(
        self,
        optimizers: Sequence[Optimizer],
        named: dict[str, nn.Parameter],
        holders: dict[str, list[int]],
    ) -> None:
        mine = {id(one) for one in self.own.parameters()}
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["params"] = [one for one in group["params"] if id(one) in mine]
            for one in [one for one in optimizer.state if id(one) not in mine]:
                del optimizer.state[one]
        for name, one in named.items():
            if id(one) not in mine:
                forget(one, name, f"on worker {self.groups.members[holders[name][0]]}")

    def _ended(self) -> None:
        self._passes.clear()

    def passed(self) -> tuple[str, float] | None:
        """Whether parts are busy otherwise than the cut was made for."""
        busy = tell_all(self.groups.copy, self._pipeline.busy_s)
        self._pipeline.busy_s = 0.0
        mean = sum(busy) / len(busy)
        if not min(busy) or mean >= _MUCH_WORSE * self.cut.balance * max(busy):
            return None
        self._lost_s += max(busy) - mean / self.cut.balance
        shares = " | ".join(f"{one / sum(busy):.0%}" for one in busy)
        said = (
            f"parts were busy {shares} of the time, a balance of {mean / max(busy):.0%} where "
            f"{self.cut.balance:.0%} was predicted"
        )
        return (said, self._lost_s) if self.groups.seat == 0 else None

    def _checked(self, given: Sequence[Any], named: Iterable[str] = ()) -> tuple[int, ChunksOfOwn]:
        """The rows of this worker's mini-batch, and its micro-batches.

        Raises:
            ConfigError: the model is called otherwise than it was cut for.
        """
        wanted = self.cut.borders[0]
        is_right = len(given) == len(wanted) and all(
            isinstance(one, Tensor) and one.dtype is shape.dtype and one.ndim == len(shape.fixed)
            for one, shape in zip(given, wanted, strict=True)
        )
        if named or not is_right:
            raise ConfigError(
                f"a split model was cut for {len(wanted)} tensors of {[s.dtype for s in wanted]}, "
                f"and is called with {[getattr(one, 'dtype', type(one).__name__) for one in given]}"
                f"{' and ' + ', '.join(named) if named else ''}: call it as in the first batch"
            )
        if any(one.requires_grad for one in given):
            raise ConfigError(
                "a split model's inputs require gradients, which are not sent back to them"
            )
        if torch.is_autocast_enabled("cpu"):
            raise ConfigError("autocast is not carried where a model is split: leave it out")
        self._check_rows(given, rows := len(given[0]))
        parts = [torch.split(one, self._sizes(rows)) for one in given]
        return rows, {index: list(part) for index, part in enumerate(zip(*parts, strict=True))}

    def _forward(self, *given: Any, **named: Any) -> Any:
        """All workers of the copy call it."""
        rows, own = self._checked(given, named)
        keeps = torch.is_grad_enabled()
        doing = PartTask.FORWARD if keeps else PartTask.LOOK
        every = self._meet(self._called(doing, rows, given, self.cut.borders[0]))
        number, outputs = self._run(every, own, keeps=keeps)
        made = [torch.cat(one) for one in zip(*(outputs[i] for i in sorted(outputs)), strict=True)]
        if keeps:
            made = list(_Computed.apply(self, number, rows, self._anchor, *made))  # type: ignore[no-untyped-call]  # torch's has no types
        return torch.utils._pytree.tree_unflatten(made, self.cut.form)

    def _sizes(self, rows: int) -> list[int]:
        """Of the micro-batches of this worker's mini-batch."""
        return chunk_rows(rows, self.cut.shares[self.groups.part])

    def _called(
        self, doing: PartTask, rows: int, given: Sequence[Tensor], shapes: Sequence[TensorShape]
    ) -> Intent:
        """What this worker comes to with these; the first that has rows of another size is told."""
        odd = (-1, 0, 0)
        for number, (one, shape) in enumerate(zip(given, shapes, strict=True)):
            if (dim := shape.other_size(one)) is not None:
                odd = (number, dim, one.shape[dim])
                break
        return Intent(doing, -1, rows, self._num_samples(), self._mode(), self._seed(), *odd)

    def _seed(self) -> int:
        """Of random numbers that all workers have the same; below 0: of none."""
        return -1

    def _check_rows(self, given: Sequence[Tensor], rows: int) -> None:
        """Raise ConfigError where these cannot be micro-batches, or a layer has a hook."""
        if any(len(one) != rows for one in given):
            raise ConfigError(
                f"a split model is called with tensors of {[len(one) for one in given]} rows: its "
                "inputs have a row for each sample"
            )
        fixed = self.cut.fixed_rows
        if fixed is not None and set(self._sizes(rows)) != {fixed}:
            raise ConfigError(
                f"torch.export follows this model for micro-batches of {fixed} samples, and "
                f"{rows} samples are others: use drop_last=True and a batch that all workers share "
                "evenly, or --split data"
            )
        refuse_batch_norm(self._module)
        for name in self.cut.frozen:
            if self._module.get_submodule(name).training:
                raise ConfigError(BUFFER_CHANGES.format(name))
        for name, one in self._module.named_modules():
            hooks = (one._forward_hooks, one._forward_pre_hooks, one._backward_hooks)
            if name and any(hooks):
                raise ConfigError(
                    f"layer {name!r} has a hook, which would see the micro-batches of all workers, "
                    "and on one of them: take it off, or use --split data or shard"
                )

    def _run(
        self, every: Sequence[Intent], own: ChunksOfOwn, *, keeps: bool
    ) -> tuple[int, ChunksOfOwn]:
        """A forward pass that all have come to, or serve."""
        doing = PartTask.FORWARD if keeps else PartTask.LOOK
        every = only(doing, every)
        chunks = chunks_of([one.rows for one in every], self.cut.shares, in_turns=True)
        with in_mode(self._module, next(one.mode for one in every if one.doing)):
            outputs, passed = self._pipeline.forward(chunks, own, keeps=keeps)
        if passed is None:
            return -1, outputs
        number = len(self._passes)
        self._passes[number] = passed
        self._note_shares(every)
        return number, outputs

    def _serve(self, doing: PartTask, every: Sequence[Intent]) -> None:
        """Compute this part for others."""
        if doing is not PartTask.BACKWARD:
            self._run(every, {}, keeps=doing is PartTask.FORWARD)
            return
        number = max(one.number for one in every if one.doing is doing)
        chunks = self._passes[number].chunks
        rows = sum(one.rows for one in chunks if one.owner == self.groups.part)
        self._run_back(number, rows, [None] * len(self.cut.borders[-1]))

    def _mode(self) -> int:
        return module_mode(self._module)

    def backward(self, number: int, rows: int, gradients: Sequence[Tensor | None]) -> None:
        """Of the forward pass of this number, from the gradients of this worker's outputs."""
        self._refuse_outside()
        self._meet(Intent(PartTask.BACKWARD, number))
        self._run_back(number, rows, gradients)

    def _run_back(self, number: int, rows: int, gradients: Sequence[Tensor | None]) -> None:
        passed = self._passes[number]
        if not passed.kept:
            raise ConfigError(
                "backward() was called twice on what a split model gave, which is kept for one: "
                "add the losses up, and call it once"
            )
        assert self._shares is not None
        share = self._shares[self.groups.part]
        sizes = self._sizes(rows)
        whole = [
            (shape.empty(rows).zero_() if one is None else one * share)
            for shape, one in zip(self.cut.borders[-1], gradients, strict=True)
            if shape.has_gradient
        ]
        own = dict(enumerate(zip(*(torch.split(x, sizes) for x in whole), strict=True)))
        with torch.enable_grad():
            self._pipeline.backward(passed, own)


def only(doing: PartTask, every: Sequence[Intent]) -> list[Intent]:
    """What those said who do this; the others nothing."""
    return [one if one.doing is doing else _NOTHING for one in every]


class _Computed(torch.autograd.Function):
    """The whole model as one node of the graph behind a worker's outputs."""

    @staticmethod
    def forward(
        ctx: Any, spread: SpreadModel, number: int, rows: int, anchor: Tensor, *made: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.spread, ctx.number, ctx.rows = spread, number, rows
        ctx.set_materialize_grads(False)
        whole = [one for one in made if not (one.is_floating_point() or one.is_complex())]
        ctx.mark_non_differentiable(*whole)
        return tuple(one.view_as(one) for one in made)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        ctx.spread.backward(ctx.number, ctx.rows, gradients)
        return (None, None, None, None, *(None for _ in gradients))
