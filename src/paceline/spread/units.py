"""Parameters that are put together and given up at the same time: one memory, a piece each.

    unit     weight            | bias |      one stretch of memory, n elements
    workers  0        | 1      | 2    |      ceil(n / 3) each: what they step, and the state of it
    gather   all-gather: every worker has the whole stretch; parameters are views into it
    reduce   all-to-all and a sum: every worker has its piece of the gradient's sum
    free     the memory is given back; what a backward pass has kept of it points to nothing

What torch.autograd keeps for a backward pass is views into this memory, so it is made anew in the
same place before that (Y. Zhao et al., "PyTorch FSDP", VLDB 2023, section 4.1: storage that is
resized). So nothing that outlives it may be such a view, nor is what a layer writes into its own
weights kept. Above 300 lines, with which parameters are a unit, and what cannot be one. This module
must not know when.
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
"""Objects in objects that are looked into for tensors."""
_FEW, _LOOKS = 1 << 14, 16
"""Elements of a piece that are compared in each pass, or if that is more the 16th part of it."""
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterPiece:
    """What this worker has of a parameter.

    Attributes:
        held: ``(k,)``; what is stepped here.
        start: in the parameter, in elements.
        at: in this worker's row of the unit.
    """

    name: str
    held: nn.Parameter
    start: int
    at: int


class UnitRooms:
    """Memory that units use in turn: as large as the largest has needed.

    What is freed and made anew for each is another place each time, and the heap as large as all.
    """

    def __init__(self) -> None:
        self._rooms: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Room that is somebody else's once it is taken again."""
        size = math.prod(shape) * dtype.itemsize
        if name not in self._rooms or self._rooms[name].numel() < size:
            self._rooms[name] = torch.empty(size, dtype=torch.uint8)
        return self._rooms[name][:size].view(dtype).view(shape)


class ParameterUnit:
    """One unit.

    Args:
        module: that computes with them; None: the whole model does.
        named: parameters of one type, contiguous.
        rooms: that all units of this worker share.
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
        self._parameters = [one for _, one in named]
        numel = sum(one.numel() for one in self._parameters)
        self._row = -(-numel // group.size)
        self._first = group.rank * self._row
        self._flat = torch.zeros(self._row * group.size, dtype=self._parameters[0].dtype)
        self._bytes = self._flat.nbytes
        self.pieces: list[ParameterPiece] = []
        self._places: list[tuple[int, int]] = []
        at, first = 0, self._first
        for name, one in named:
            end = at + one.numel()
            self._places.append((at, end))
            self._flat[at:end].copy_(one.detach().reshape(-1))
            start, stop = max(at, first), min(end, first + self._row)
            if start < stop:
                held = nn.Parameter(self._flat[start:stop].clone(), one.requires_grad)
                self.pieces.append(
                    ParameterPiece(name=name, held=held, start=start - at, at=start - first)
                )
                vars(one)["held"] = held  # for when it is hidden
            one.data = self._flat[at:end].view(one.shape)
            at = end
        self.num_trained = self.num_arrived = 0
        """How many of its gradients there are in a backward pass, and how many have come."""
        self.is_here, self.is_reduced = True, False
        self._names = [name for name, _ in named]
        self._versions = [one._version for one in self._parameters]
        self._num_looks = 0

    @property
    def num_bytes(self) -> int:
        return self._bytes

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        return self._parameters

    @property
    def frees_early(self) -> bool:
        """Whether nothing computes with it once all of its gradients have arrived."""
        return self.num_trained == len(self._parameters)

    def begin_back(self) -> None:
        """A backward pass begins; what is frozen may have thawed since the last."""
        with torch._C.DisableTorchFunctionSubclass():
            self.num_trained = sum(one.requires_grad for one in self._parameters)
        self.num_arrived, self.is_reduced = 0, False

    def gather(self) -> None:
        """All of it is here."""
        self._flat.untyped_storage().resize_(self._bytes)
        mine = self._flat[self._first : self._first + self._row]
        for one in self.pieces:
            mine[one.at : one.at + one.held.numel()].copy_(one.held.detach())
        self._group.all_gather(mine, self._flat).wait()
        self.is_here = True
        self.show()

    def show(self) -> None:
        """Its parameters are parameters."""
        for one in self._parameters:
            one.__class__ = nn.Parameter

    def hide(self) -> None:
        """Nobody but the model itself looks at them."""
        for name, one in zip(self._names, self._parameters, strict=True):
            one.__class__ = AbsentParameter
            assert isinstance(one, AbsentParameter)
            one.called, one.place = name, "in pieces on all workers"

    def refuse_written(self) -> None:
        """A pass is through with it: what that has written here is in nobody's piece, and lost.

        What torch counts is seen at once, ``.data.clamp_()`` where this worker has a piece, in one
        of the next passes.

        Raises:
            ConfigError: it has written; the parameter is named.
        """
        start, size = self._flat.data_ptr(), self._flat.itemsize
        for number, (one, place) in enumerate(zip(self._parameters, self._places, strict=True)):
            is_there = not one.numel() or one.data_ptr() == start + place[0] * size
            if not is_there or one._version != self._versions[number]:
                raise _written(self._names[number])
        for piece in self.pieces:
            held, at = piece.held.detach(), self._first + piece.at
            length = max(_FEW, -(-held.numel() // _LOOKS))
            first = self._num_looks * length % (-(-held.numel() // length) * length)
            mine = self._flat[at + first : at + min(held.numel(), first + length)]
            wanted = held[first : first + length]
            if not torch.equal(mine, wanted) and not are_equal(mine, wanted):
                raise _written(piece.name)
        self._num_looks += 1

    @property
    def address(self) -> int:
        """Of its memory."""
        return int(self._flat.untyped_storage().data_ptr())

    def free(self) -> None:
        """Its memory is given back."""
        self.is_here = False
        self._flat.untyped_storage().resize_(0)
        self.hide()

    def reduce(self, share: float = 1.0) -> None:
        """Each worker's piece gets the sum of all gradients; where nobody has one, none.

        Args:
            share: by which this worker's are multiplied.
        """
        size, num = self._group.size, len(self._parameters)
        shape, dtype = (size, self._row + num), self._flat.dtype
        rows = self._rooms.take("rows", shape, dtype)
        rows[:, self._row :] = 0.0
        for number, (one, place) in enumerate(zip(self._parameters, self._places, strict=True)):
            with torch._C.DisableTorchFunctionSubclass():
                gradient, one.grad = one.grad, None
            if gradient is None:
                self._spread(rows.new_zeros(()).expand(one.numel()), place[0], rows, share)
            else:
                self._spread(gradient.reshape(-1), place[0], rows, share)
                rows[:, self._row + number] = 1.0
            del gradient
        every = self._rooms.take("every", shape, dtype)
        self._group.all_to_all(rows.view(-1), every.view(-1)).wait()
        total = torch.sum(every, 0, out=self._rooms.take("own", shape[1:], dtype))
        numbers = {name: number for number, name in enumerate(self._names)}
        for piece in self.pieces:
            if float(total[self._row + numbers[piece.name]]):
                _add(piece.held, total[piece.at : piece.at + piece.held.numel()])
        self.num_arrived, self.is_reduced = 0, True

    def _spread(self, values: Tensor, at: int, rows: Tensor, share: float) -> None:
        """Elements that begin at ``at`` of the unit, each to the row of the worker that has it."""
        for worker, row in enumerate(rows):
            first = worker * self._row
            start, stop = max(at, first), min(at + values.numel(), first + self._row)
            if start < stop:
                out = row[start - first : stop - first]
                torch.mul(values[start - at : stop - at], share, out=out)


def _written(name: str) -> ConfigError:
    return ConfigError(
        f"parameter {name!r} is changed by forward() (a clamp in place, an embedding's max_norm), "
        "and where parameters are in pieces on all workers that would be lost: compute with a "
        "tensor made of it, F.linear(x, self.weight.clamp(min=0)), or, with --split data, "
        f"{IN_THE_STEP}"
    )


def _add(held: nn.Parameter, gradient: Tensor) -> None:
    """As a backward pass does, so that who watches gradients hears of it, and copies them.

    Args:
        gradient: in room that is somebody else's afterwards.
    """
    with torch.enable_grad():
        torch.autograd.backward([held.view_as(held)], [gradient])
    if held.grad is not None and held.grad.data_ptr() == gradient.data_ptr():
        held.grad = held.grad.clone()  # nobody watches


def find_units(model: nn.Module, outside: set[int], group: MemberGroup) -> list[ParameterUnit]:
    """The units of a model, the whole model's own first.

    Args:
        outside: parameters, by identity, that are used where their unit does not compute.

    Raises:
        ConfigError: a parameter is not contiguous.
    """
    names = {id(one): name for name, one in model.named_parameters()}
    for name, one in model.named_parameters():
        if not one.is_contiguous():
            raise ConfigError(f"parameter {name!r} is not contiguous, and cannot be in pieces")
    units: list[ParameterUnit] = []
    rooms = UnitRooms()
    for owner, held in _owners(model, outside):
        named = [(names[id(one)], one) for one in held]
        units.append(ParameterUnit(len(units), owner, named, group, rooms))
    return units


def unit_bytes(model: nn.Module) -> tuple[int, ...]:
    """Of each unit, where all parameters are used by their own layers."""
    return tuple(sum(one.nbytes for one in held) for _, held in _owners(model, set()))


def _owners(
    model: nn.Module, outside: set[int]
) -> Iterator[tuple[nn.Module | None, list[nn.Parameter]]]:
    """Who computes with which parameters, those of one type together."""
    users: dict[int, int] = {}
    modules = list(modules_of(model))
    for module in modules:
        for one in module.parameters():
            users[id(one)] = users.get(id(one), 0) + 1
    alone = {one for one, count in users.items() if count == 1} - outside
    rest = [one for one in model.parameters() if id(one) not in alone]
    owners: list[tuple[nn.Module | None, list[nn.Parameter]]] = [(None, rest)]
    owners += [
        (module, [one for one in module.parameters() if id(one) in alone]) for module in modules
    ]
    for owner, held in owners:
        for dtype in dict.fromkeys(one.dtype for one in held):
            yield owner, [one for one in held if one.dtype is dtype]


def modules_of(model: nn.Module) -> Iterator[nn.Module]:
    """Those that compute at a time: children, and in containers their children."""
    for child in model.children():
        if isinstance(child, _CONTAINERS):
            yield from modules_of(child)
        elif next(child.parameters(), None) is not None:
            yield child


def without_views(made: Any, units: Sequence[ParameterUnit]) -> Any:
    """The same, and what is a view of a parameter of these has memory of its own."""
    addresses = {one.address for one in units}
    leaves, form = torch.utils._pytree.tree_flatten(made)
    views = [_address_of(one) in addresses for one in leaves]
    if not any(views):
        return made
    rows = [x.clone() if is_view else x for x, is_view in zip(leaves, views, strict=True)]
    return torch.utils._pytree.tree_unflatten(rows, form)


def _address_of(value: Any) -> int:
    """Of its memory; -1: it has none of its own."""
    if not isinstance(value, Tensor):
        return -1
    try:
        return int(value.untyped_storage().data_ptr())
    except RuntimeError:  # a sparse one, or one that torch.func wraps
        return -1


class _Uses(TorchFunctionMode):
    """Which parameters an operation is given while their module does not compute."""

    def __init__(self, owners: dict[int, nn.Module]) -> None:
        super().__init__()
        self._owners, self.inside, self.found = owners, list[nn.Module](), set[int]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for one in torch.utils._pytree.tree_leaves((args, kwargs)):
            owner = self._owners.get(id(one)) if isinstance(one, nn.Parameter) else None
            if owner is not None and owner not in self.inside:
                self.found.add(id(one))
        return func(*args, **(kwargs or {}))


def used_outside(model: nn.Module, look: Callable[[], object]) -> set[int]:
    """Parameters, by identity, that the model uses by itself, and not through their layer."""
    owners = {id(one): module for module in modules_of(model) for one in module.parameters()}
    uses = _Uses(owners)
    handles = []
    for module in modules_of(model):
        handles.append(module.register_forward_pre_hook(lambda one, _: uses.inside.append(one)))
        handles.append(module.register_forward_hook(lambda one, *_: uses.inside.remove(one)))
    try:
        with torch.no_grad(), uses:
            look()
    finally:
        for handle in handles:
            handle.remove()
    return uses.found


def refuse_hidden(name: str, made: Any) -> None:
    """Raise ConfigError where tensors with gradients lie in an object that torch does not open."""
    for one in torch.utils._pytree.tree_leaves(made):
        if not isinstance(one, Tensor) and _hides(one, _DEEPEST):
            raise ConfigError(
                f"{name} gives an object, {type(one).__name__}, and gradients of tensors inside of "
                "it are not seen where parameters are in pieces: return tensors, in tuples or "
                "dicts, and make it of them outside; or use --split data"
            )


def _hides(value: Any, depth: int) -> bool:
    """Whether there is a tensor with a gradient in its attributes."""
    if isinstance(value, nn.Module | type):
        return False
    slots = [one for kind in type(value).__mro__ for one in getattr(kind, "__slots__", ())]
    held = [*getattr(value, "__dict__", {}).values(), *(getattr(value, x, None) for x in slots)]
    for one in torch.utils._pytree.tree_leaves(held):
        if isinstance(one, Tensor):
            if one.requires_grad:
                return True
        elif depth and _hides(one, depth - 1):
            return True
    return False


def cut_state(value: Any, whole: Tensor, piece: ParameterPiece) -> Any:
    """This worker's piece of what an optimizer keeps for a parameter."""
    if not isinstance(value, Tensor) or value.shape != whole.shape:
        return value
    return value.reshape(-1)[piece.start : piece.start + piece.held.numel()].clone()
