"""Gather and free parameters in units: one block of memory, of which each worker has a piece.

    unit     weight            | bias |      one block of memory, n elements
    workers  0        | 1      | 2    |      ceil(n / 3) each: what they step, and its state
    gather   all-gather: every worker has the whole block; parameters are views into it
    reduce   all-to-all and a sum: every worker has its piece of the gradient's sum
    free     the memory is returned; views kept for a backward pass point to nothing

What torch.autograd keeps for a backward pass are views into this memory, so its storage is resized
in place before that pass (Y. Zhao et al., "PyTorch FSDP", VLDB 2023, section 4.1). Hence nothing
that outlives the memory may be such a view, and what a layer writes into its own weights is lost.
Above 300 lines, since it also finds the units of a model, and refuses what cannot be one. This
module must not know when units are gathered.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..errors import ConfigError
from ..exchange.group import MemberGroup
from ..replica.absent import AbsentParameter
from ..replica.held import IN_THE_STEP
from .own_code import are_equal

_DEEPEST = 2
"""How deeply nested objects are searched for tensors."""
_FEW, _LOOKS = 1 << 14, 16
"""Elements of a piece that each pass compares: ``_FEW``, or a 16th of the piece if that is more."""
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterPiece:
    """This worker's piece of a parameter.

    Attributes:
        held: ``(k,)``; the elements that are stepped here.
        start: where it begins in the parameter, in elements.
        at: where it begins in this worker's row of the unit, in elements.
    """

    name: str
    held: nn.Parameter
    start: int
    at: int


class UnitRooms:
    """Buffers that units use in turn, each as large as the largest unit needs.

    Buffers allocated and freed for each unit would lie in a new place each time, and the heap would
    grow to the size of all of them.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a buffer, which is valid until the buffer of this name is taken again."""
        size = math.prod(shape) * dtype.itemsize
        if name not in self._buffers or self._buffers[name].numel() < size:
            self._buffers[name] = torch.empty(size, dtype=torch.uint8)
        return self._buffers[name][:size].view(dtype).view(shape)


class ParameterUnit:
    """Parameters that are gathered and freed together.

    Args:
        number: of the unit.
        module: the module that computes with them; None: the whole model.
        named: the parameters and their names; all contiguous, and of one dtype.
        rooms: buffers that all units of this worker share.
    """

    def __init__(
        self,
        number: int,
        module: nn.Module | None,
        named: Sequence[tuple[str, nn.Parameter]],
        group: MemberGroup,
        rooms: UnitRooms,
    ) -> None:
        self.number, self.module, self._group, self._rooms = number, module, group, rooms
        self._parameters = [parameter for _, parameter in named]
        numel = sum(parameter.numel() for parameter in self._parameters)
        self._row = -(-numel // group.size)
        self._first = group.rank * self._row
        self._flat = torch.zeros(self._row * group.size, dtype=self._parameters[0].dtype)
        self._bytes = self._flat.nbytes
        self.pieces: list[ParameterPiece] = []
        self._places: list[tuple[int, int]] = []
        at, first = 0, self._first
        for name, parameter in named:
            end = at + parameter.numel()
            self._places.append((at, end))
            self._flat[at:end].copy_(parameter.detach().reshape(-1))
            start, stop = max(at, first), min(end, first + self._row)
            if start < stop:
                held = nn.Parameter(self._flat[start:stop].clone(), parameter.requires_grad)
                self.pieces.append(
                    ParameterPiece(name=name, held=held, start=start - at, at=start - first)
                )
                vars(parameter)["held"] = held  # for when it is hidden
            parameter.data = self._flat[at:end].view(parameter.shape)
            at = end
        self.num_trained = self.num_arrived = 0
        """Gradients of the unit expected in a backward pass, and those that have arrived."""
        self.is_here, self.is_reduced = True, False
        self._names = [name for name, _ in named]
        self._versions = [parameter._version for parameter in self._parameters]
        self._num_looks = 0

    @property
    def num_bytes(self) -> int:
        return self._bytes

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        return self._parameters

    @property
    def frees_early(self) -> bool:
        """Whether the unit can be freed once all of its expected gradients have arrived."""
        return self.num_trained == len(self._parameters)

    def begin_back(self) -> None:
        """Begin a backward pass; other parameters may be trained than in the last."""
        with torch._C.DisableTorchFunctionSubclass():
            self.num_trained = sum(parameter.requires_grad for parameter in self._parameters)
        self.num_arrived, self.is_reduced = 0, False

    def gather(self) -> None:
        """Gather all parameters of the unit from all workers."""
        self._flat.untyped_storage().resize_(self._bytes)
        row = self._flat[self._first : self._first + self._row]
        for piece in self.pieces:
            row[piece.at : piece.at + piece.held.numel()].copy_(piece.held.detach())
        self._group.all_gather(row, self._flat).wait()
        self.is_here = True
        self.show()

    def show(self) -> None:
        """Turn the unit's parameters into normal ones again."""
        for parameter in self._parameters:
            parameter.__class__ = nn.Parameter

    def hide(self) -> None:
        """Let the script's access to the unit's parameters raise, between the model's passes."""
        for name, parameter in zip(self._names, self._parameters, strict=True):
            parameter.__class__ = AbsentParameter
            assert isinstance(parameter, AbsentParameter)
            parameter.called, parameter.place = name, "in pieces on all workers"

    def refuse_written(self) -> None:
        """Check after a pass that it has not written to parameters: the writes would be lost.

        Writes that torch counts are seen at once; ``.data.clamp_()`` is seen in one of the next
        passes, where this worker has a piece.

        Raises:
            ConfigError: the pass has written to a parameter.
        """
        start, size = self._flat.data_ptr(), self._flat.itemsize
        for number, (parameter, place) in enumerate(
            zip(self._parameters, self._places, strict=True)
        ):
            is_view = not parameter.numel() or parameter.data_ptr() == start + place[0] * size
            if not is_view or parameter._version != self._versions[number]:
                raise _written(self._names[number])
        for piece in self.pieces:
            held, at = piece.held.detach(), self._first + piece.at
            length = max(_FEW, -(-held.numel() // _LOOKS))
            first = self._num_looks * length % (-(-held.numel() // length) * length)
            found = self._flat[at + first : at + min(held.numel(), first + length)]
            expected = held[first : first + length]
            if not torch.equal(found, expected) and not are_equal(found, expected):
                raise _written(piece.name)
        self._num_looks += 1

    @property
    def address(self) -> int:
        """The address of the unit's memory."""
        return int(self._flat.untyped_storage().data_ptr())

    def free(self) -> None:
        """Free the unit's memory."""
        self.is_here = False
        self._flat.untyped_storage().resize_(0)
        self.hide()

    def reduce(self, share: float = 1.0) -> None:
        """Add the sum of all workers' gradients to each worker's pieces.

        A piece whose parameter has a gradient in no worker gets none.

        Args:
            share: factor of this worker's gradients.
        """
        size, num = self._group.size, len(self._parameters)
        shape, dtype = (size, self._row + num), self._flat.dtype
        rows = self._rooms.take("rows", shape, dtype)
        rows[:, self._row :] = 0.0
        for number, (parameter, place) in enumerate(
            zip(self._parameters, self._places, strict=True)
        ):
            with torch._C.DisableTorchFunctionSubclass():
                gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                self._spread(rows.new_zeros(()).expand(parameter.numel()), place[0], rows, share)
            else:
                self._spread(gradient.reshape(-1), place[0], rows, share)
                rows[:, self._row + number] = 1.0
            del gradient
        received = self._rooms.take("every", shape, dtype)
        self._group.all_to_all(rows.view(-1), received.view(-1)).wait()
        total = torch.sum(received, 0, out=self._rooms.take("own", shape[1:], dtype))
        numbers = {name: number for number, name in enumerate(self._names)}
        for piece in self.pieces:
            if float(total[self._row + numbers[piece.name]]):
                _add(piece.held, total[piece.at : piece.at + piece.held.numel()])
        self.num_arrived, self.is_reduced = 0, True

    def _spread(self, values: Tensor, at: int, rows: Tensor, share: float) -> None:
        """Copy elements of the unit, from ``at`` on, to the rows of the workers that have them."""
        for worker, row in enumerate(rows):
            first = worker * self._row
            start, stop = max(at, first), min(at + values.numel(), first + self._row)
            if start < stop:
                out = row[start - first : stop - first]
                torch.mul(values[start - at : stop - at], share, out=out)


def _written(name: str) -> ConfigError:
    return ConfigError(
        f"parameter {name!r} is changed by forward() (a clamp in place, an embedding's max_norm), "
        "which would be lost, since workers hold it in pieces: compute with a tensor made from it, "
        "F.linear(x, self.weight.clamp(min=0)), or, with --split data, "
        f"{IN_THE_STEP}"
    )


def _add(held: nn.Parameter, gradient: Tensor) -> None:
    """Add a gradient as a backward pass does, so that hooks of the parameter see and copy it.

    Args:
        gradient: in a buffer that is used for something else afterwards.
    """
    with torch.enable_grad():
        torch.autograd.backward([held.view_as(held)], [gradient])
    if held.grad is not None and held.grad.data_ptr() == gradient.data_ptr():
        held.grad = held.grad.clone()  # there is no hook


def find_units(model: nn.Module, outside: set[int], group: MemberGroup) -> list[ParameterUnit]:
    """Divide the parameters of a model into units, the whole model's own first.

    Args:
        outside: ids of parameters that are used while their module does not compute.

    Raises:
        ConfigError: a parameter is not contiguous.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        if not parameter.is_contiguous():
            raise ConfigError(f"parameter {name!r} is not contiguous, and cannot be in pieces")
    units: list[ParameterUnit] = []
    rooms = UnitRooms()
    for owner, parameters in _owners(model, outside):
        named = [(names[id(parameter)], parameter) for parameter in parameters]
        units.append(ParameterUnit(len(units), owner, named, group, rooms))
    return units


def unit_bytes(model: nn.Module) -> tuple[int, ...]:
    """Return the bytes of each unit, if all parameters are used only by their own layers."""
    return tuple(sum(p.nbytes for p in parameters) for _, parameters in _owners(model, set()))


def _owners(
    model: nn.Module, outside: set[int]
) -> Iterator[tuple[nn.Module | None, list[nn.Parameter]]]:
    """Yield the parameters of each unit, of one dtype, with the module that computes with them."""
    num_users: dict[int, int] = {}
    modules = list(modules_of(model))
    for module in modules:
        for parameter in module.parameters():
            num_users[id(parameter)] = num_users.get(id(parameter), 0) + 1
    alone = {key for key, count in num_users.items() if count == 1} - outside
    rest = [parameter for parameter in model.parameters() if id(parameter) not in alone]
    owners: list[tuple[nn.Module | None, list[nn.Parameter]]] = [(None, rest)]
    owners += [(module, [p for p in module.parameters() if id(p) in alone]) for module in modules]
    for owner, parameters in owners:
        for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
            yield owner, [parameter for parameter in parameters if parameter.dtype is dtype]


def modules_of(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that compute one at a time: children, looking into containers."""
    for child in model.children():
        if isinstance(child, _CONTAINERS):
            yield from modules_of(child)
        elif next(child.parameters(), None) is not None:
            yield child


def without_views(values: Any, units: Sequence[ParameterUnit]) -> Any:
    """Return a tree of values in which views of the units' parameters are copied."""
    addresses = {unit.address for unit in units}
    leaves, form = torch.utils._pytree.tree_flatten(values)
    are_views = [_address_of(leaf) in addresses for leaf in leaves]
    if not any(are_views):
        return values
    copies = [x.clone() if is_view else x for x, is_view in zip(leaves, are_views, strict=True)]
    return torch.utils._pytree.tree_unflatten(copies, form)


def _address_of(value: Any) -> int:
    """Return the address of a tensor's memory; -1: it has none."""
    if not isinstance(value, Tensor):
        return -1
    try:
        return int(value.untyped_storage().data_ptr())
    except RuntimeError:  # a sparse one, or one that torch.func wraps
        return -1


class _Uses(TorchFunctionMode):
    """Record the parameters that operations use while their module does not compute."""

    def __init__(self, owners: dict[int, nn.Module]) -> None:
        super().__init__()
        self._owners, self.running, self.outside = owners, list[nn.Module](), set[int]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in torch.utils._pytree.tree_leaves((args, kwargs)):
            owner = self._owners.get(id(leaf)) if isinstance(leaf, nn.Parameter) else None
            if owner is not None and owner not in self.running:
                self.outside.add(id(leaf))
        return func(*args, **(kwargs or {}))


def used_outside(model: nn.Module, look: Callable[[], object]) -> set[int]:
    """Return the ids of parameters that the model uses directly, and not through their layer.

    Args:
        look: calls the model.
    """
    owners = {id(p): module for module in modules_of(model) for p in module.parameters()}
    uses = _Uses(owners)
    handles = []
    for module in modules_of(model):
        handles.append(module.register_forward_pre_hook(lambda m, _: uses.running.append(m)))
        handles.append(module.register_forward_hook(lambda m, *_: uses.running.remove(m)))
    try:
        with torch.no_grad(), uses:
            look()
    finally:
        for handle in handles:
            handle.remove()
    return uses.outside


def refuse_hidden(name: str, values: Any) -> None:
    """Raise ConfigError where tensors with gradients lie in an object that torch does not open.

    Args:
        name: of what returns the values, for the message.
    """
    for leaf in torch.utils._pytree.tree_leaves(values):
        if not isinstance(leaf, Tensor) and _hides(leaf, _DEEPEST):
            raise ConfigError(
                f"{name} returns an object, {type(leaf).__name__}, and gradients of tensors inside "
                "it are not seen while parameters are in pieces: return tensors, in tuples or "
                "dicts, and create the object from them outside; or use --split data"
            )


def _hides(value: Any, depth: int) -> bool:
    """Whether an object has a tensor that requires a gradient among its attributes."""
    if isinstance(value, nn.Module | type):
        return False
    slots = [slot for kind in type(value).__mro__ for slot in getattr(kind, "__slots__", ())]
    values = [*getattr(value, "__dict__", {}).values(), *(getattr(value, s, None) for s in slots)]
    for leaf in torch.utils._pytree.tree_leaves(values):
        if isinstance(leaf, Tensor):
            if leaf.requires_grad:
                return True
        elif depth and _hides(leaf, depth - 1):
            return True
    return False


def cut_state(value: Any, whole: Tensor, piece: ParameterPiece) -> Any:
    """Cut this worker's piece out of a value that an optimizer keeps for a parameter."""
    if not isinstance(value, Tensor) or value.shape != whole.shape:
        return value
    return value.reshape(-1)[piece.start : piece.start + piece.held.numel()].clone()
