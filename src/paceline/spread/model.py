"""The script's own module, computed by all workers of a copy: what stands in its place in each.

    model(x)             -> meet -> micro-batches through all parts -> outputs; one node of a graph
    loss.backward()      -> that node -> meet -> gradients through all parts
    model.state_dict()   -> the whole model's (whole.py)
    model.parameters()   -> the same objects; those of other parts are absent (replica/absent.py)

What a run steps is the part (`OwnPart`): to exchange, store and optimizer that is the model. Above
300 lines, since all that stands in a module's place is read together. This module must not know the
loop.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import ConfigError
from ..replica.absent import forget
from ..store.joint import parameters_of
from ..store.layout import Layout
from ..store.optimizer_copy import EXISTS
from .cut import ModelCut
from .group import SplitGroups
from .meeting import Intent, Meeting, PartTask, mode_of
from .pipeline import PartRunner, Passed, chunk_rows, chunks_of
from .whole import SpreadState

_NOTHING = Intent(PartTask.STEP_END)


class OwnPart(nn.Module):
    """One part, with parameters and buffers under the whole model's names."""

    def __init__(self, cut: ModelCut, number: int, module: nn.Module) -> None:
        super().__init__()
        part = cut.parts[number]
        self.computed = part.module
        parameters, buffers = dict(_every(module.named_parameters)), dict(module.named_buffers())
        self._named = [(name, parameters[name]) for name in part.parameters]
        self._kept = [(name, buffers[name]) for name in part.buffers]

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(self._named)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        return iter(self._kept)


def _every(named: Callable[[], Iterator[tuple[str, Any]]]) -> Iterator[tuple[str, Any]]:
    return named()


class SpreadModel:
    """One worker's side of a model that is spread over its copy.

    Args:
        module: the script's, whole; its other parts are given up here.
        optimizers: over it; they keep what they have of this part.
        num_samples: of this worker's mini-batch, 0 where it has none.

    Attributes:
        own: what a run steps here.
        shared: names of parameters of this part that others use, too.
        counted: names of those whose norm is counted here.
        shared_sizes: of all that several parts use: name, type and elements.
    """

    whole: SpreadState

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        cut: ModelCut,
        groups: SplitGroups,
        num_samples: Callable[[], int],
    ) -> None:
        self.groups, self.cut = groups, cut
        self._module, self._num_samples = module, num_samples
        self.own = OwnPart(cut, groups.part, module)
        self._meeting = Meeting(groups.copy, groups.members)
        self._pipeline = PartRunner(cut.parts[groups.part].module, groups.copy, cut.borders)
        self._passes: dict[int, Passed] = {}
        self._shares: list[float] | None = None
        self._anchor = torch.zeros((), requires_grad=True)
        self._note_sharing()
        named = dict(module.named_parameters())
        self._state_names = [
            (name, id(one)) for name, one in module.state_dict(keep_vars=True).items()
        ]
        self._names = {id(one): name for name, one in [*named.items(), *module.named_buffers()]}
        self._without_memory = (
            [(name, torch.empty_like(one, device="meta")) for name, one in named.items()],
            [(name, torch.empty_like(one, device="meta")) for name, one in module.named_buffers()],
        )
        self._groups_of = [
            [[self._names[id(one)] for one in group["params"]] for group in optimizer.param_groups]
            for optimizer in optimizers
        ]
        self._give_up_others(optimizers, named)
        self._stand_in()

    def _note_sharing(self) -> None:
        parts, here = self.cut.parts, self.groups.part
        self.shared = set(parts[here].shared)
        every = {name for part in parts for name in part.shared}
        sizes = dict(self._module.named_parameters())
        self.shared_sizes = [
            (name, sizes[name].dtype, sizes[name].numel()) for name in sorted(every)
        ]
        before = {name for part in parts[:here] for name in part.parameters}
        self.counted = set(parts[here].parameters) - before

    def _give_up_others(
        self, optimizers: Sequence[Optimizer], named: dict[str, nn.Parameter]
    ) -> None:
        mine = {id(one) for one in self.own.parameters()}
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["params"] = [one for one in group["params"] if id(one) in mine]
            for one in [one for one in optimizer.state if id(one) not in mine]:
                del optimizer.state[one]
        where = {
            name: f"on worker {self.groups.members[number]}"
            for number, part in reversed(list(enumerate(self.cut.parts)))
            for name in part.parameters
        }
        for name, one in named.items():
            if id(one) not in mine:
                forget(one, name, where.get(name, "nowhere: no part uses it"))

    # -- in the place of the script's module ----------------------------------------------------

    def _stand_in(self) -> None:
        module: Any = self._module
        module.forward = self._forward
        module.state_dict = self._state_dict
        module.load_state_dict = _refuse_to_load
        module.zero_grad = self._zero_grad

    def _zero_grad(self, set_to_none: bool = True) -> None:
        self.own.zero_grad(set_to_none)

    def _forward(self, *given: Any, **named: Any) -> Any:
        """All workers of the copy call it."""
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
        rows = len(given[0])
        keeps = torch.is_grad_enabled()
        doing = PartTask.FORWARD if keeps else PartTask.LOOK
        if torch.is_autocast_enabled("cpu"):
            raise ConfigError("autocast is not carried where a model is split: leave it out")
        every = self._meet(Intent(doing, -1, rows, self._num_samples(), self._mode()))
        parts = [torch.split(one, chunk_rows(rows, self.cut.most)) for one in given]
        own = {index: list(part) for index, part in enumerate(zip(*parts, strict=True))}
        number, outputs = self._run(every, own, keeps=keeps)
        made = [torch.cat(one) for one in zip(*(outputs[i] for i in sorted(outputs)), strict=True)]
        if keeps:
            made = list(_Computed.apply(self, number, rows, self._anchor, *made))  # type: ignore[no-untyped-call]
        return torch.utils._pytree.tree_unflatten(made, self.cut.form)

    def _run(
        self, every: Sequence[Intent], own: dict[int, list[Tensor]], *, keeps: bool
    ) -> tuple[int, dict[int, list[Tensor]]]:
        """A forward pass that all have come to, or serve."""
        doing = PartTask.FORWARD if keeps else PartTask.LOOK
        every = [one if one.doing is doing else _NOTHING for one in every]
        chunks = chunks_of([one.rows for one in every], self.cut.most)
        with self._in_mode(next(one.mode for one in every if one.doing)):
            outputs, passed = self._pipeline.forward(chunks, own, keeps=keeps)
        if passed is None:
            return -1, outputs
        number = len(self._passes)
        self._passes[number] = passed
        total = sum(one.samples for one in every if one.doing)
        self._shares = [one.samples / max(1, total) if one.doing else 0.0 for one in every]
        return number, outputs

    def _meet(self, mine: Intent) -> list[Intent]:
        """What all have come to, once that is what this worker has; until then it serves."""
        while True:
            every = self._meeting.show(mine)
            doing = self._meeting.decide(every)
            if doing is mine.doing:
                return every
            self._serve(doing, every)

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
        return mode_of(one.training for one in self._module.modules())

    @contextmanager
    def _in_mode(self, mode: int) -> Iterator[None]:
        """This part in the mode that others are in.

        Raises:
            ConfigError: it is a mix, and here it is another one.
        """
        if (mine := self._mode()) == mode:
            yield
            return
        if mode > 1:
            raise ConfigError(
                "another worker calls the model with some modules in training and others not, and "
                "here they are others (model.train(), model.eval()): set them in all workers alike"
            )
        modules = list(self._module.modules())
        before = [one.training for one in modules]
        for one in modules:
            one.training = bool(mode)
        try:
            yield
        finally:
            for one, flag in zip(modules, before, strict=True):
                one.training = flag
        assert self._mode() == mine

    def backward(self, number: int, rows: int, gradients: Sequence[Tensor | None]) -> None:
        """Of the forward pass of this number, from the gradients of this worker's outputs."""
        if not self._num_samples():
            raise ConfigError(
                "backward() through a split model stands outside the loop over the loader, where "
                "no mini-batch says what its gradient weighs"
            )
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
        sizes = chunk_rows(rows, self.cut.most)
        whole = [
            (shape.empty(rows).zero_() if one is None else one * share)
            for shape, one in zip(self.cut.borders[-1], gradients, strict=True)
            if shape.has_gradient
        ]
        own = dict(enumerate(zip(*(torch.split(x, sizes) for x in whole), strict=True)))
        with torch.enable_grad():
            self._pipeline.backward(passed, own)

    def come_to_end(self) -> None:
        """A step, an epoch or an evaluation is over here: serve all others until they are there."""
        self._meet(Intent(PartTask.STEP_END))
        self._passes.clear()

    def take_shares(self) -> list[float] | None:
        """By what gradients were weighed since the last time; None: there was no pass."""
        shares, self._shares = self._shares, None
        return shares

    # -- the whole model ------------------------------------------------------------------------

    def lay_out(self, layout: Layout, read: Callable[[], tuple[Tensor, Tensor | None]]) -> None:
        """The layout of this part is known: that of all, and who hands out what."""
        grouped = [name for one in self._groups_of for group in one for name in group]
        self.whole = SpreadState(self.groups, layout, self._without_memory, grouped, read)

    version: Callable[[], int]
    """Of the parameters that this worker holds; filled in when it joins the run."""

    def tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers of the whole model at this worker's version."""
        return self.whole.tensors(self.whole.fetch_all(self.version()))

    def _state_dict(self, *_: Any, prefix: str = "", **__: Any) -> "OrderedDict[str, Tensor]":
        found = self.tensors()
        names = self._names
        return OrderedDict((prefix + name, found[names[one]]) for name, one in self._state_names)

    def optimizer_state(self, number: int, optimizer: Optimizer) -> dict[str, Any]:
        """What ``state_dict`` of this optimizer is, over the whole model."""
        rows = self.whole.states(self.whole.fetch_all(self.version()))
        state: dict[int, dict[str, Any]] = {}
        groups, at = [], 0
        for names, group in zip(self._groups_of[number], optimizer.param_groups, strict=True):
            values = {key: value for key, value in group.items() if key != "params"}
            groups.append({**values, "params": list(range(at, at + len(names)))})
            for index, name in enumerate(names, at):
                row = dict(rows.get(name, {}))
                if int(row.pop(EXISTS, torch.zeros(1))) and row:
                    state[index] = row
            at += len(names)
        return {"state": state, "param_groups": groups}

    def pin(self, block: Tensor, buffers: Tensor | None, out: Tensor) -> None:
        """The whole version that this worker is at, to where a checkpoint is written from."""
        self.whole.fetch(self.version(), out, (block, buffers))

    def keep_state_dict(self, optimizers: Sequence[Optimizer]) -> None:
        """``state_dict()`` of each optimizer is of the whole model."""
        for number, one in enumerate(optimizers):
            one.state_dict = partial(self.optimizer_state, number, one)  # type: ignore[method-assign]

    def close(self) -> None:
        """The run is over."""
        if hasattr(self, "whole"):
            self.whole.close()

    def check_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Raise ConfigError where this worker would have nothing to step."""
        if not any(parameters_of(one) for one in optimizers):
            raise ConfigError(
                f"part {self.groups.part} of the model has nothing to train: use fewer parts"
            )


class _Computed(torch.autograd.Function):
    """The whole model as one node of the graph behind a worker's outputs."""

    @staticmethod
    def forward(
        ctx: Any, spread: SpreadModel, number: int, rows: int, anchor: Tensor, *made: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.spread, ctx.number, ctx.rows = spread, number, rows
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(one for one in made if not one.is_floating_point()))
        return tuple(one.view_as(one) for one in made)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        ctx.spread.backward(ctx.number, ctx.rows, gradients)
        return (None, None, None, None, *(None for _ in gradients))


def _refuse_to_load(*_: Any, **__: Any) -> NoReturn:
    raise ConfigError(
        "model.load_state_dict() after prepare(): the model is split, and no worker has the whole; "
        "load before, model.load_state_dict(...); model, optimizer, loader = pace.prepare(...)"
    )
