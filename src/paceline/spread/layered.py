"""A model whose layers are divided over channels: all workers compute all rows, each its columns.

    model(x)         -> meet -> inputs of all workers to all -> whole layers, and own columns of the
                        divided ones (columns.py) -> outputs; each keeps those of its rows
    loss.backward()  -> meet -> gradients of all outputs to all -> backwards through the same

A parameter of a divided layer lies in columns on all workers, each of which steps its own; all
others are whole in each, and their gradients the same bits: all workers compute the same sums over
the same rows. Random numbers of a pass come from one seed, but for those of divided channels. Above
300 lines with how it is divided. This module must not know the loop.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.optim import Optimizer

from ..errors import ConfigError
from ..plan import format_bytes
from ..replica.absent import forget
from ..splits.channels import find_pairs
from ..splits.measuring import measure
from ..splits.parts import make_parts
from ..splits.tracing import TracedModel, generator_states, untouched
from ..store.optimizer_copy import is_elementwise
from .base import OwnTensors
from .borders import Inputs, find_borders, leaves_of
from .chunks import Chunk, TensorShape, Values
from .columns import LayerPair, PassRandom, can_divide, divide, pair_of
from .cut import FEW, ModelCut, followed, refuse_other_results
from .group import PeerGroup, SplitGroups, tell_all
from .meeting import Intent, PartTask
from .model import PipelinedModel
from .modes import modes_kept
from .pipeline import Passed, refuse_other_sizes

_INPUT, _OUTPUT_GRAD = range(2)
"""Tags of messages."""
_SEEDS = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnCut:
    """What a worker knows of how layers are divided.

    Args:
        cut: the whole model as its one part.
        is_random: whether it computes with random numbers in training.
    """

    cut: ModelCut
    pairs: tuple[LayerPair, ...]
    is_random: bool


def make_columns(
    model: nn.Module, inputs: Inputs, mini_batch: int, groups: SplitGroups
) -> ColumnCut:
    """Which layers are divided; all workers come to the same.

    Args:
        mini_batch: samples of a worker's, the most.

    Raises:
        ConfigError: no two layers in a row can be, or the model would compute something else.
    """
    given = inputs(min(mini_batch, FEW))
    code = followed(model, given)
    traced = code.traced
    if traced.how == "torch.export":
        raise ConfigError(
            f"{type(model).__name__} can only be followed by torch.export, for one size of batch, "
            "and here all workers' batches are computed as one; use --split network"
        )
    refuse_other_results(model, traced, given)
    found = None if groups.seat else _choose(traced, given, mini_batch, groups)
    chosen = tell_all(groups.ranks.everyone, found)[0]
    if len(traced.pieces) != chosen["num_pieces"]:
        raise ConfigError(
            f"worker {groups.seat} finds {len(traced.pieces)} pieces in the model, and worker 0 "
            f"{chosen['num_pieces']}: build it alike in all"
        )
    pairs = tuple(pair_of(traced, one) for one in chosen["pairs"])
    if not pairs:
        raise ConfigError(
            f"{type(model).__name__} has no two layers in a row with channels for "
            f"{groups.copy.size} workers, each called once: use --split network or data"
        )
    whole = make_parts(traced, [0] * len(traced.pieces))
    borders, form = find_borders(model, whole, inputs, (2, 3))
    return ColumnCut(
        cut=ModelCut(
            parts=whole, code=code, flow=(), order=(), schedule="", borders=borders, form=form,
            shares=((1.0,),) * groups.copy.size, fixed_rows=None,
            balance=1.0, note=_note(traced, pairs, groups),
            sent_bytes=chosen["sum_bytes"] + _shown_bytes(borders, mini_batch, groups.copy.size),
        ),
        pairs=pairs, is_random=_is_random(model, given),
    )  # fmt: skip


def _choose(
    traced: TracedModel, given: Sequence[Tensor], mini_batch: int, groups: SplitGroups
) -> dict[str, Any]:
    """What the first worker finds, as plain data: pieces of each pair, and what sums send."""
    size = groups.copy.size
    found = [
        one for one in find_pairs(traced, measure(traced, given).graph)
        if can_divide(traced, pair_of(traced, one.nodes), given, size)
    ]  # fmt: skip
    rows = size * mini_batch / len(given[0])
    summed = round(rows * sum(one.in_bytes + one.out_bytes for one in found))
    return {
        "num_pieces": len(traced.pieces),
        "pairs": [list(one.nodes) for one in found],
        "sum_bytes": 2 * (size - 1) * summed,
    }


def _note(traced: TracedModel, pairs: Sequence[LayerPair], groups: SplitGroups) -> str:
    named = [pair.name for pair in pairs]
    shown = ", ".join(named[:4]) + (f" and {len(named) - 4} more" if len(named) > 4 else "")
    layers = [traced.graph_module.get_submodule(str(node.target))
              for pair in pairs for node in (pair.first, pair.second)]  # fmt: skip
    divided = sum(one.weight.nbytes for one in layers)  # type: ignore[misc]  # a layer has a weight
    whole = sum(one.nbytes for one in traced.module.parameters())
    return (
        f"{groups.name}: channels of {shown} on all workers; "
        f"{format_bytes(divided)} of {format_bytes(whole)} of parameters are divided"
    )


def _shown_bytes(borders: Sequence[Sequence[TensorShape]], rows: int, size: int) -> int:
    """Of an update: each worker's inputs, and the gradients of its outputs, to all others."""
    given = sum(one.num_bytes(rows) for one in borders[0])
    made = sum(one.num_bytes(rows) for one in borders[-1] if one.has_gradient)
    return size * (size - 1) * (given + made)


def _is_random(model: nn.Module, given: Sequence[Tensor]) -> bool:
    """Whether it draws from torch's generator, which all workers can set alike.

    Raises:
        ConfigError: it draws from others.
    """
    with modes_kept(model), untouched(model), torch.no_grad():
        model.train()
        before = generator_states()
        model(*given)
        after = generator_states()
    if after[1:] != before[1:]:
        raise ConfigError(
            f"{type(model).__name__} draws random numbers from Python's or NumPy's generator, and "
            "where layers are divided all workers compute the same rows and would draw others: "
            "draw from torch's (torch.rand), or use --split network or data"
        )
    return after != before


class ColumnModel(PipelinedModel):
    """One worker's side of a model in columns.

    Args:
        module: the script's, whole; what it has of divided layers is given up but for its columns.
        optimizers: over it; they keep the columns.
        num_samples: of this worker's mini-batch, 0 where it has none.

    Raises:
        ConfigError: an optimizer needs whole parameters.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        columns: ColumnCut,
        groups: SplitGroups,
        num_samples: Callable[[], int],
    ) -> None:
        for one in optimizers:
            if not is_elementwise(one):
                raise ConfigError(
                    f"{type(one).__name__} may need whole parameters, and layers are divided: use "
                    "torch's own SGD or Adam (and their kin), or --split network"
                )
        self._columns, self._random = columns, PassRandom(groups.part)
        super().__init__(module, optimizers, columns.cut, groups, num_samples)

    def _make_runner(self) -> "ColumnRunner":
        return ColumnRunner(self.cut.parts[0].module, self.groups.copy, self.cut.borders)

    def _hold(self, optimizers: Sequence[Optimizer]) -> None:
        computed = self.cut.parts[0].module
        assert isinstance(computed, fx.GraphModule)
        named = dict(self._module.named_parameters())
        pieces = divide(
            self.cut.code.traced, computed, self._columns.pairs, self.groups.copy, self._random
        )
        self.own = OwnTensors(
            [(name, pieces[name].held if name in pieces else one) for name, one in named.items()],
            list(self._module.named_buffers()),
            computed,
        )
        self.starts = {name: one.start for name, one in pieces.items()}
        self.counted = frozenset(named if self.groups.part == 0 else pieces)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for number, one in enumerate(group["params"]):
                    piece = pieces.get(self._names[id(one)])
                    if piece is None:
                        continue
                    group["params"][number] = piece.held
                    if row := optimizer.state.pop(one, None):
                        optimizer.state[piece.held] = {
                            key: piece.of(value).clone()
                            if isinstance(value, Tensor) and value.shape == one.shape
                            else value
                            for key, value in row.items()
                        }
        for name in pieces:
            forget(named[name], name, "in columns on all workers", pieces[name].held)

    def _divided_worse(self) -> None:
        """All workers do the same."""

    def _check_gradients(self, *, has_batch: bool) -> None:
        """Parameters that all have whole must get the same in all, or they come apart."""
        whole = [pair for pair in self.own.named_parameters() if pair[0] not in self.starts]
        sums = [-1 if one.grad is None else _checksum(one.grad) for _, one in whole]
        every = tell_all(self.groups.copy, sums)
        for number, (name, _) in enumerate(whole):
            if len({one[number] for one in every}) > 1:
                raise ConfigError(
                    f"parameter {name!r}, which all workers have whole, gets a gradient that does "
                    "not come through model(x), and another one in each: let the model give what "
                    "the loss needs of it, use weight_decay, or --split data"
                )

    def _seed(self) -> int:
        """Of a pass that this worker begins; all take one of theirs."""
        if not self._columns.is_random or not self._mode():
            return -1
        return int(torch.randint(_SEEDS, ()))

    def _run(
        self, every: Sequence[Intent], own: dict[int, list[Tensor]], *, keeps: bool
    ) -> tuple[int, dict[int, list[Tensor]]]:
        doing = PartTask.FORWARD if keeps else PartTask.LOOK
        with self._random.begun(next(one.seed for one in every if one.doing is doing)):
            return super()._run(every, own, keeps=keeps)


def _checksum(one: Tensor) -> int:
    return zlib.crc32(one.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)


class ColumnRunner:
    """All rows of all workers through one worker's columns.

    Args:
        module: takes the model's inputs, gives its outputs.
        borders: of inputs and outputs.
    """

    def __init__(
        self, module: nn.Module, group: PeerGroup, borders: Sequence[Sequence[TensorShape]]
    ) -> None:
        self._module, self._group, self._borders = module, group, borders
        self.busy_s = 0.0  # not looked at: all workers do the same
        self.used: Sequence[Sequence[int]] = ()

    def forward(
        self, chunks: list[Chunk], own: Values, *, keeps: bool
    ) -> tuple[dict[int, list[Tensor]], Passed | None]:
        """The outputs of this worker's rows.

        Args:
            keeps: a backward pass may follow.
        """
        given = self._gather(chunks, own, self._borders[0], _INPUT)
        with torch.set_grad_enabled(keeps):
            made = leaves_of(self._module(*given))
        refuse_other_sizes(made, self._borders[-1], sum(one.rows for one in chunks))
        outputs: dict[int, list[Tensor]] = {}
        start = 0
        for one in chunks:
            if one.owner == self._group.rank:
                outputs[one.number] = [
                    x.detach()[shape.length(start) : shape.length(start + one.rows)]
                    for x, shape in zip(made, self._borders[-1], strict=True)
                ]
            start += one.rows
        return outputs, Passed(chunks, [[([], made)]]) if keeps else None

    def backward(self, passed: Passed, own: Values) -> None:
        """The gradients of all rows through these columns, added to their own.

        Args:
            own: of those outputs of this worker's rows that are used.
        """
        ((_, made),) = passed.kept.pop()
        shapes = [self._borders[-1][number] for number in self.used[-1]]
        gradients = self._gather(passed.chunks, own, shapes, _OUTPUT_GRAD)
        tensors = [made[number] for number in self.used[-1]]
        pairs = [pair for pair in zip(tensors, gradients, strict=True) if pair[0].requires_grad]
        if pairs:
            torch.autograd.backward([x for x, _ in pairs], [gradient for _, gradient in pairs])

    def _gather(
        self, chunks: Sequence[Chunk], own: Values, shapes: Sequence[TensorShape], tag: int
    ) -> list[Tensor]:
        """What all workers have, row after row."""
        rank, size = self._group.rank, self._group.size
        sent, rows = [], []
        for one in chunks:
            if one.owner != rank:
                rooms = [shape.empty(one.rows) for shape in shapes]
                sent += [(self._group.begin_receive(x, one.owner, tag), x) for x in rooms]
                rows.append(rooms)
                continue
            mine = [x.detach().contiguous() for x in own[one.number]]
            rows.append(mine)
            for peer in range(size):
                if peer != rank:
                    sent += [(self._group.begin_send(x, peer, tag), x) for x in mine]
        for pending, _ in sent:
            pending.wait()
        return [torch.cat(parts) for parts in zip(*rows, strict=True)]
