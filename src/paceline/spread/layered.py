"""Compute a model divided over channels: every worker computes all rows, with its own columns.

    model(x)         -> meet -> inputs of all workers to all -> whole layers, and own columns of the
                        divided ones (columns.py) -> outputs; each worker keeps those of its rows
    loss.backward()  -> meet -> gradients of all outputs to all -> backwards through the same

A parameter of a divided layer is in columns on all workers, each of which steps its own. All
other parameters are whole in each worker, and their gradients are equal bit for bit: all workers
compute the same sums over the same rows. The random numbers of a pass come from one seed, except
within divided channels. Above 300 lines, since how a model is divided is here, too. This module
must not know the loop.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.optim import Optimizer

from ..errors import ConfigError
from ..exchange.group import PeerGroup
from ..plan import format_bytes
from ..replica.absent import forget
from ..splits.measuring import measure
from ..splits.parts import make_parts
from ..splits.tracing import TracedModel, generator_states, untouched
from ..store.optimizer_copy import is_elementwise
from .base import OwnTensors
from .batch_norm import refuse_batch_norm, training_batch_norms
from .borders import Inputs, find_borders, leaves_of
from .chunks import Chunk, TensorShape, Values
from .columns import LayerPair, PassRandom, divide, divisible_pairs, pair_of
from .cut import FEW, ModelCut, followed, refuse_other_results
from .group import SplitGroups, tell_all
from .meeting import Intent, PartTask
from .model import PipelinedModel
from .modes import modes_kept
from .pipeline import Passed, refuse_other_sizes

_INPUT, _OUTPUT_GRAD = range(2)
"""Tags of messages."""
_SEEDS = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnCut:
    """How layers are divided, as every worker knows it.

    Args:
        cut: a cut with the whole model as its only part.
        pairs: the pairs of layers that are divided.
        is_random: whether the model draws random numbers in training mode.
    """

    cut: ModelCut
    pairs: tuple[LayerPair, ...]
    is_random: bool


def make_columns(
    model: nn.Module, inputs: Inputs, mini_batch: int, groups: SplitGroups
) -> ColumnCut:
    """Choose the layers that are divided; all workers get the same.

    Args:
        mini_batch: samples of the largest mini-batch of a worker.

    Raises:
        ConfigError: no two layers in a row can be divided, or the model would compute something
            else.
    """
    args = inputs(min(mini_batch, FEW))
    norms = training_batch_norms(model, is_frozen=model.training)
    refuse_batch_norm(norms, instead="data or network")
    code = followed(model, args)
    traced = code.traced
    if traced.how == "torch.export":
        raise ConfigError(
            f"{type(model).__name__} can only be traced by torch.export, for one batch size, but "
            "here all workers' batches are computed as one; use --split network"
        )
    refuse_other_results(model, traced, args)
    choice = None if groups.seat else _choose(traced, args, mini_batch, groups)
    chosen = tell_all(groups.ranks.everyone, choice)[0]
    if len(traced.pieces) != chosen["num_pieces"]:
        raise ConfigError(
            f"worker {groups.seat} finds {len(traced.pieces)} pieces in the model, and worker 0 "
            f"{chosen['num_pieces']}: build the same model in all"
        )
    pairs = tuple(pair_of(traced, nodes) for nodes in chosen["pairs"])
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
            sent_bytes=chosen["sum_bytes"] + _gathered_bytes(borders, mini_batch, groups.copy.size),
        ),
        pairs=pairs, is_random=_is_random(model, args),
    )  # fmt: skip


def _choose(
    traced: TracedModel, args: Sequence[Tensor], mini_batch: int, groups: SplitGroups
) -> dict[str, Any]:
    """Choose the pairs that are divided, as plain data, with the bytes that their sums send."""
    size = groups.copy.size
    pairs = divisible_pairs(traced, measure(traced, args).graph, args, size)
    scale = size * mini_batch / len(args[0])
    summed_bytes = round(scale * sum(pair.in_bytes + pair.out_bytes for pair in pairs))
    return {
        "num_pieces": len(traced.pieces),
        "pairs": [list(pair.nodes) for pair in pairs],
        "sum_bytes": 2 * (size - 1) * summed_bytes,
    }


def _note(traced: TracedModel, pairs: Sequence[LayerPair], groups: SplitGroups) -> str:
    """Describe how layers are divided, in one line of the plan."""
    names = [pair.name for pair in pairs]
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    layers = [traced.graph_module.get_submodule(str(node.target))
              for pair in pairs for node in (pair.first, pair.second)]  # fmt: skip
    divided_bytes = sum(layer.weight.nbytes for layer in layers)  # type: ignore[misc]  # a layer has a weight
    all_bytes = sum(parameter.nbytes for parameter in traced.module.parameters())
    return (
        f"{groups.name}: channels of {shown} on all workers; "
        f"{format_bytes(divided_bytes)} of {format_bytes(all_bytes)} of parameters are divided"
    )


def _gathered_bytes(borders: Sequence[Sequence[TensorShape]], rows: int, size: int) -> int:
    """Return the bytes per update to send each worker's inputs and output gradients to all."""
    input_bytes = sum(shape.num_bytes(rows) for shape in borders[0])
    output_bytes = sum(shape.num_bytes(rows) for shape in borders[-1] if shape.has_gradient)
    return size * (size - 1) * (input_bytes + output_bytes)


def _is_random(model: nn.Module, args: Sequence[Tensor]) -> bool:
    """Whether a model draws from torch's generator, which all workers can seed alike.

    Raises:
        ConfigError: it draws from another generator.
    """
    with modes_kept(model), untouched(model), torch.no_grad():
        model.train()
        before = generator_states()
        model(*args)
        after = generator_states()
    if after[1:] != before[1:]:
        raise ConfigError(
            f"{type(model).__name__} draws random numbers from Python's or NumPy's generator, but "
            "with divided layers all workers compute the same rows and would draw different "
            "numbers: draw from torch's (torch.rand), or use --split network or data"
        )
    return after != before


class ColumnModel(PipelinedModel):
    """One worker's side of a model in columns.

    Args:
        module: the script's whole module; of divided layers, only this worker's columns are kept.
        optimizers: over the module; they keep the columns.
        num_samples: returns the samples of this worker's mini-batch, 0 where it has none.

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
        for optimizer in optimizers:
            if not is_elementwise(optimizer):
                raise ConfigError(
                    f"{type(optimizer).__name__} may need whole parameters, but layers are "
                    "divided: use torch's own SGD or Adam (or the like), or --split network"
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
            [(name, pieces[name].held if name in pieces else p) for name, p in named.items()],
            list(self._module.named_buffers()),
            computed,
        )
        self.starts = {name: piece.start for name, piece in pieces.items()}
        self.counted = frozenset(named if self.groups.part == 0 else pieces)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for number, parameter in enumerate(group["params"]):
                    piece = pieces.get(self._names[id(parameter)])
                    if piece is None:
                        continue
                    group["params"][number] = piece.held
                    if state := optimizer.state.pop(parameter, None):
                        optimizer.state[piece.held] = {
                            key: piece.of(value).clone()
                            if isinstance(value, Tensor) and value.shape == parameter.shape
                            else value
                            for key, value in state.items()
                        }
        for name in pieces:
            forget(named[name], name, "in columns on all workers", pieces[name].held)

    def _divided_worse(self) -> None:
        """Return None: all workers do the same work."""

    def _check_gradients(self, *, has_batch: bool) -> None:
        """Raise ConfigError where a whole parameter's gradient differs between workers."""
        whole = [pair for pair in self.own.named_parameters() if pair[0] not in self.starts]
        checksums = [-1 if p.grad is None else _checksum(p.grad) for _, p in whole]
        rows = tell_all(self.groups.copy, checksums)
        for number, (name, _) in enumerate(whole):
            if len({row[number] for row in rows}) > 1:
                raise ConfigError(
                    f"parameter {name!r}, which all workers have whole, gets a gradient that does "
                    "not come through model(x), and differs between workers: let the model return "
                    "what the loss needs of it, use weight_decay, or --split data"
                )

    def _seed(self) -> int:
        """Return a seed for a pass; all workers use that of one of its callers."""
        if not self._columns.is_random or not self._mode():
            return -1
        return int(torch.randint(_SEEDS, ()))

    def _run(
        self, intents: Sequence[Intent], own_inputs: dict[int, list[Tensor]], *, keeps: bool
    ) -> tuple[int, dict[int, list[Tensor]]]:
        doing = PartTask.FORWARD if keeps else PartTask.LOOK
        seed = next(intent.seed for intent in intents if intent.doing is doing)
        with self._random.begun(seed):
            return super()._run(intents, own_inputs, keeps=keeps)


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)


class ColumnRunner:
    """Runs all rows of all workers through one worker's columns.

    Args:
        module: takes the model's inputs, and returns its outputs.
        borders: types and shapes of the inputs and of the outputs.
    """

    def __init__(
        self, module: nn.Module, group: PeerGroup, borders: Sequence[Sequence[TensorShape]]
    ) -> None:
        self._module, self._group, self._borders = module, group, borders
        self.busy_s = 0.0  # not measured: all workers do the same work
        self.used: Sequence[Sequence[int]] = ()

    def forward(
        self, chunks: list[Chunk], own_inputs: Values, *, keeps: bool
    ) -> tuple[dict[int, list[Tensor]], Passed | None]:
        """Compute all rows; return the outputs of this worker's own, and the pass if ``keeps``.

        Args:
            own_inputs: inputs of this worker's rows.
            keeps: whether a backward pass may follow.
        """
        inputs = self._gather(chunks, own_inputs, self._borders[0], _INPUT)
        with torch.set_grad_enabled(keeps):
            outputs = leaves_of(self._module(*inputs))
        refuse_other_sizes(outputs, self._borders[-1], sum(chunk.rows for chunk in chunks))
        own_outputs: dict[int, list[Tensor]] = {}
        start = 0
        for chunk in chunks:
            if chunk.owner == self._group.rank:
                own_outputs[chunk.number] = [
                    y.detach()[shape.length(start) : shape.length(start + chunk.rows)]
                    for y, shape in zip(outputs, self._borders[-1], strict=True)
                ]
            start += chunk.rows
        return own_outputs, Passed(chunks, [[([], outputs)]]) if keeps else None

    def backward(self, passed: Passed, own_gradients: Values) -> None:
        """Compute the gradients of all rows, and add them up in these columns.

        Args:
            own_gradients: gradients of those outputs of this worker's rows that are used.
        """
        ((_, outputs),) = passed.kept.pop()
        shapes = [self._borders[-1][number] for number in self.used[-1]]
        gradients = self._gather(passed.chunks, own_gradients, shapes, _OUTPUT_GRAD)
        used = [outputs[number] for number in self.used[-1]]
        pairs = [pair for pair in zip(used, gradients, strict=True) if pair[0].requires_grad]
        if pairs:
            torch.autograd.backward([y for y, _ in pairs], [gradient for _, gradient in pairs])

    def _gather(
        self, chunks: Sequence[Chunk], own_values: Values, shapes: Sequence[TensorShape], tag: int
    ) -> list[Tensor]:
        """Return the tensors of all workers' rows, concatenated in the order of chunks."""
        rank, size = self._group.rank, self._group.size
        messages, gathered = [], []
        for chunk in chunks:
            if chunk.owner != rank:
                buffers = [shape.empty(chunk.rows) for shape in shapes]
                messages += [(self._group.begin_receive(x, chunk.owner, tag), x) for x in buffers]
                gathered.append(buffers)
                continue
            own_tensors = [x.detach().contiguous() for x in own_values[chunk.number]]
            gathered.append(own_tensors)
            for peer in range(size):
                if peer != rank:
                    messages += [(self._group.begin_send(x, peer, tag), x) for x in own_tensors]
        for pending, _ in messages:
            pending.wait()
        return [torch.cat(parts) for parts in zip(*gathered, strict=True)]
