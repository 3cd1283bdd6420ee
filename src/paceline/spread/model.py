"""A model in parts behind one another, each on a worker: a pipeline.

    model(x)          -> meet -> micro-batches through all parts -> outputs; one node of a graph
    loss.backward()   -> that node -> meet -> gradients through all parts
    model.parameters()   the same objects; those of other parts are absent (replica/absent.py)

This module must not know the loop. Above 300 lines, since what a pass is refused for stands beside
it.
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
from .base import STALE, OwnTensors, SpreadModel
from .borders import used_tensors
from .chunks import TensorShape, chunk_rows, chunks_of
from .cut import BUFFER_CHANGES, ModelCut
from .group import SplitGroups, tell_all
from .meeting import Intent, PartTask
from .modes import in_mode, module_mode, refuse_batch_norm
from .pipeline import PartRunner, Passed

if TYPE_CHECKING:
    from .layered import ColumnRunner

_MUCH_WORSE = 0.85
_MOST_BITS = 62
_FAR, _CLOSE = 1e4, 1e-2
"""How much larger one gradient is than another where a hook is tried, and how close sums are."""
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
        self._num_passes = 0
        """Of all steps, so that none of an earlier one is taken for one of this."""
        self._used: dict[int, list[list[int]]] = {}
        self._is_back = False
        self._lost_s = 0.0
        self._anchor = torch.zeros((), requires_grad=True)
        self._hold(optimizers)
        self._stand_in(optimizers)
        self.buffers = list(module.buffers())
        number_of = {id(one): number for number, one in enumerate(self.buffers)}
        self._owners = [
            (owner, key, number_of[id(one)])
            for owner in module.modules()
            for key, one in owner._buffers.items()
            if one is not None
        ]
        self.mark_buffers()
        self._layers = [(name, one) for name, one in module.named_modules() if name]
        cut.code.retire()

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
        self._tied = sorted(self.shared)
        for number, name in enumerate(self._tied):
            register(named[name], self._arrived, number)
        refuse_uneven_hooks(self.own.named_parameters())

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

    def _divided_worse(self) -> tuple[str, float] | None:
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
        if not (rows := len(given[0])):
            raise ConfigError(
                "a split model is called with no row: leave the call out where there is none, "
                "if len(x): ..., in all workers alike, or use --split data"
            )
        self._check_rows(given, rows)
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
            made = list(_Computed.apply(self, number, self._anchor, *made))  # type: ignore[no-untyped-call]  # torch's has no types
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
        for name, one in self._layers:
            if one._forward_hooks or one._forward_pre_hooks or one._backward_hooks:
                raise ConfigError(
                    f"layer {name!r} has a hook, which would see the micro-batches of all workers, "
                    "and on one of them: take it off, or use --split data or shard"
                )
        self.cut.code.check()

    def _run(
        self, every: Sequence[Intent], own: ChunksOfOwn, *, keeps: bool
    ) -> tuple[int, ChunksOfOwn]:
        """A forward pass that all have come to, or serve."""
        doing = PartTask.FORWARD if keeps else PartTask.LOOK
        doers = only(doing, every)
        chunks = chunks_of([one.rows for one in doers], self.cut.shares, in_turns=True)
        with in_mode(self._module, next(one.mode for one in doers if one.doing)):
            outputs, passed = self._pipeline.forward(chunks, own, keeps=keeps)
        if passed is None:
            return -1, outputs
        number, self._num_passes = self._num_passes, self._num_passes + 1
        self._passes[number] = passed
        self._note_shares(every)
        return number, outputs

    def _serve(self, doing: PartTask, every: Sequence[Intent]) -> None:
        """Compute this part for others."""
        if doing is not PartTask.BACKWARD:
            self._run(every, {}, keeps=doing is PartTask.FORWARD)
            return
        passed = self._passed(max(one.number for one in every if one.doing is doing))
        self._run_back(passed, every, [None] * len(self.cut.borders[-1]))

    def _mode(self) -> int:
        return module_mode(self._module)

    def backward(self, number: int, gradients: Sequence[Tensor | None]) -> None:
        """Of the forward pass of this number, from the gradients of this worker's outputs."""
        self._refuse_outside()
        passed = self._passed(number)
        outputs = sum(1 << at for at, one in enumerate(gradients) if one is not None)
        if len(gradients) > _MOST_BITS:
            outputs = -1
        every = self._meet(Intent(PartTask.BACKWARD, number, outputs))
        self._run_back(passed, every, gradients)

    def _passed(self, number: int) -> Passed:
        if (passed := self._passes.get(number)) is None:
            raise ConfigError(STALE)
        if not passed.kept:
            raise ConfigError(
                "backward() was called twice on what a split model gave, which is kept for one: "
                "add the losses up, and call it once"
            )
        return passed

    def _run_back(
        self, passed: Passed, every: Sequence[Intent], gradients: Sequence[Tensor | None]
    ) -> None:
        assert self._shares is not None
        share = self._shares[self.groups.part]
        rows = [one.rows for one in passed.chunks if one.owner == self.groups.part]
        outputs = functools.reduce(
            operator.or_, (one.rows for one in only(PartTask.BACKWARD, every))
        )
        self._pipeline.used = used = self._used_of(outputs)
        parts = []
        for number in used[-1]:
            shape, one = self.cut.borders[-1][number], gradients[number]
            whole = shape.empty(sum(rows)).zero_() if one is None else one * share
            parts.append(torch.split(whole, [shape.length(size) for size in rows]))
        own = {chunk: [part[chunk] for part in parts] for chunk in range(len(rows))}
        with self._going_back():
            self._pipeline.backward(passed, own)

    @contextmanager
    def _going_back(self) -> Iterator[None]:
        """Gradients come through ``model(x)`` meanwhile."""
        self._is_back = True
        with torch.enable_grad(), self._through_model():
            yield
        self._is_back = False

    def _used_of(self, outputs: int) -> list[list[int]]:
        if outputs not in self._used:
            self._used[outputs] = used_tensors(self.cut.borders, self.cut.flow, outputs)
        return self._used[outputs]

    def mark_buffers(self) -> None:
        self._marks = self._buffer_marks()

    def _buffer_marks(self) -> list[tuple[int, int]]:
        """Another one of a buffer that was written, or whose memory was replaced.

        Those of this part the run itself moves; ``HeldMemory`` writes into them what replaced it.
        """
        placed = {id(one) for one in self.own.buffers()}
        return [(one._version, one.data_ptr() * (id(one) not in placed)) for one in self.buffers]

    def _take_buffers(self) -> None:
        """Values of buffers that the script has made anew go where the old ones lie.

        Raises:
            ConfigError: one has another type or shape since.
        """
        for owner, key, number in self._owners:
            mine, found = self.buffers[number], owner._buffers.get(key)
            if found is mine:
                continue
            if found is not None and (found.dtype, found.shape) == (mine.dtype, mine.shape):
                with torch.no_grad():
                    mine.copy_(found)
                owner._buffers[key] = mine
            elif key not in owner._non_persistent_buffers_set:  # those are caches of any size
                raise ConfigError(
                    f"buffer {self._names[id(mine)]!r} was made another one after prepare(), which "
                    "parts of a split model do not have: keep its type and shape, or use "
                    "--split data"
                )

    def _changed_buffers(self) -> int:
        self._take_buffers()
        now = self._buffer_marks()
        if now == self._marks:
            return 0
        pairs = enumerate(zip(now, self._marks, strict=True))
        found = sum(1 << number for number, (one, before) in pairs if one != before)
        return found if len(now) <= _MOST_BITS else -1

    def _arrived(self, number: int, _: Tensor) -> None:
        """A parameter that several parts have has got a gradient."""
        if not self._is_back:
            raise ConfigError(
                f"parameter {self._tied[number]!r} gets a gradient that does not come through "
                "model(x), and each part that has it would add all of that: let the model give "
                "what the loss needs of it, use weight_decay, or --split data"
            )


def only(doing: PartTask, every: Sequence[Intent]) -> list[Intent]:
    """What those said who do this; the others nothing."""
    return [one if one.doing is doing else _NOTHING for one in every]


def refuse_uneven_hooks(named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Raise ConfigError where a parameter's hook makes of a sum what it does not of its parts."""
    for name, one in named:
        for hook in list((one._backward_hooks or {}).values()):
            if not _keeps_sums(hook, one):
                raise ConfigError(
                    f"parameter {name!r} has a hook that is not linear, and it would see the "
                    "gradient of each micro-batch, a part of the batch's: clip by "
                    "pace.clip_grad_value_ or pace.clip_grad_norm_, or use --split data"
                )


def _keeps_sums(hook: Callable[[Tensor], Tensor | None], parameter: Tensor) -> bool:
    def after(gradient: Tensor) -> Tensor:
        made = hook(given := gradient.clone())
        return given if made is None else made

    with kept_random_state(), torch.no_grad():
        one, other = torch.randn_like(parameter), torch.randn_like(parameter)
        try:
            whole, parts = after(_FAR * one + other), _FAR * after(one) + after(other)
        except Exception:  # a script's own; it may need what comes later, and nobody can tell
            return True
    return bool(torch.allclose(whole, parts, rtol=_CLOSE, atol=_CLOSE))


class _Computed(torch.autograd.Function):
    """The whole model as one node of the graph behind a worker's outputs."""

    @staticmethod
    def forward(
        ctx: Any, spread: PipelinedModel, number: int, anchor: Tensor, *made: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.spread, ctx.number = spread, number
        ctx.set_materialize_grads(False)
        whole = [one for one in made if not (one.is_floating_point() or one.is_complex())]
        ctx.mark_non_differentiable(*whole)
        return tuple(one.detach() for one in made)  # no view, which may not be changed in place

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        ctx.spread.backward(ctx.number, gradients)
        return (None, None, None, *(None for _ in gradients))
