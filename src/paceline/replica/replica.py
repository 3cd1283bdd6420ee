"""One member's copy of the model: its parameters, buffers and gradients as flat memory.

The user's objects stay what they are; only the memory under them is moved, so that a pull is one
copy and a push at most one. Post-accumulate hooks copy each gradient into the outgoing slot while
it is still warm, or leave it where torch made it (`OwnGradients`): for who takes it from there, and
for a script that keeps gradients, or their graph, over the next pass. Above 300 lines with what it
refuses. This module must not know where the slot leads to.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import ConfigError
from ..store.joint import parameters_of
from ..store.layout import Layout, TensorPlace, bind, in_one_memory, lay_out
from ..store.optimizer_copy import has_hooks, has_hooks_on_all, state_rows
from .held import HeldMemory
from .lent import LentPlaces
from .own_gradients import OwnGradients, register

Hyper = tuple[tuple[Any, ...], ...]


class Replica:
    """The model and optimizer of one member.

    Args:
        model: any module with at least one trainable parameter, on one device.
        optimizer: the user's, over (some of) the model's parameters.
        rule: the optimizer that is applied to pushes: the user's, or one that averages.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, rule: Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer
        named = list(model.named_parameters())
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self.buffers = [buffer for _, buffer in model.named_buffers()]
        self.device = _only_device([*self.parameters, *self.buffers])
        _refuse_whole_numbers(named)
        rows = state_rows(rule, self.parameters)
        self.layout: Layout = lay_out(named, model.named_buffers(), rows)
        self.held = HeldMemory(model, self.layout)
        self._home: Tensor | None = None
        self._slot: Tensor | None = None
        self.outgoing: Tensor
        """Where gradients are gathered, on the model's device; the slot itself on a CPU."""
        self._grads: list[Tensor] = []
        self._lent = LentPlaces(self._grads)
        self._left: list[tuple[int, int]] = []
        """Per gradient: its counter of changes when a hook left it, and where it lies."""
        self._num_hooked = 0
        self._own: OwnGradients | None = None
        """Where they stay; None: they are gathered as they are computed."""
        self._are_sent_from_here = True
        """Whether those that stay are copied out when they are sent; else others take them."""
        self._check: Callable[[], None] = _nothing
        self._handles: list[Any] = []

    # -- parameters -----------------------------------------------------------------------------

    def write_to(self, block: Tensor) -> None:
        """Copy the parameters and buffers into ``block`` (bytes)."""
        places = (*self.layout.parameters.places, *self.layout.buffers.places)
        for tensor, place in zip([*self.parameters, *self.buffers], places, strict=True):
            place.view(block).copy_(tensor.detach())

    def live_in(self, block: Tensor) -> None:
        """Let the parameters be views into ``block``; nothing is copied."""
        bind(self.parameters, self.layout.parameters, block)
        self.held.lie_in(block)

    def move_to(self, block: Tensor) -> None:
        """Let parameters and buffers lie in ``block``, and give private memory up."""
        for buffer, place in zip(self.buffers, self.layout.buffers.places, strict=True):
            place.view(block).copy_(buffer)
        self._let_buffers_live_in(block)
        self.live_in(block)
        self._home = None

    def live_alone(self) -> Tensor:
        """Let parameters and buffers be views into private memory, which is returned."""
        if self._home is None:
            size = self.layout.slot_bytes
            self._home = torch.zeros(size, dtype=torch.uint8, device=self.device)
        self.write_to(self._home)
        self.live_in(self._home)
        self._let_buffers_live_in(self._home)
        return self._home

    def _let_buffers_live_in(self, block: Tensor) -> None:
        bind(self.buffers, self.layout.buffers, block)
        self.held.buffers_lie_in(block)

    def digest(self) -> int:
        """A checksum of what the parameters hold."""
        found = 0
        for one in self.parameters:
            rows = one.detach().cpu().contiguous().reshape(-1)
            found = zlib.crc32(rows.view(torch.uint8).numpy().data, found)
        return found

    def release(self) -> None:
        """Parameters, buffers and gradients have memory of their own again, and what they hold."""
        self._drop_hooks()
        for tensor in (*self.parameters, *self.model.buffers()):
            tensor.data = tensor.detach().clone()
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.detach().clone()

    # -- gradients ------------------------------------------------------------------------------

    def push_into(self, slot: Tensor, check: Callable[[], None]) -> None:
        """From now on gradients are copied into ``slot`` as they are computed.

        ``check`` is called before each copy and may raise to leave the step.
        """
        for number in range(len(self._grads)):
            if self.parameters[number].grad is not self._grads[number]:
                self._leave_if_held(number)
        self._slot = slot
        self._check = check
        is_local = self.device.type == "cpu"
        self.outgoing = (
            slot if is_local else torch.zeros(slot.numel(), dtype=torch.uint8, device=self.device)
        )
        before, self._grads, self._left = self._grads, [], []
        self._lent = LentPlaces(self._grads)
        for number, parameter in enumerate(self.parameters):
            view = self._place(number)
            self._grads.append(view)
            self._lent.add(view)
            if before and parameter.grad is before[number]:
                parameter.grad = view.copy_(before[number])
            self._left.append((view._version, view.data_ptr()))
        if self._own is None or not self._are_sent_from_here:
            self._gather_by_hooks()

    def _gather_by_hooks(self) -> None:
        self._drop_hooks()
        for number, parameter in enumerate(self.parameters):
            if parameter.is_floating_point() or parameter.is_complex():
                self._handles.append(register(parameter, self._copy_out, number))

    def leave_to(self, own: OwnGradients) -> None:
        """From now on gradients stay where torch makes them, and who made ``own`` takes them."""
        self._drop_hooks()
        self._own, self._are_sent_from_here = own, False

    def gather_anew(self) -> None:
        """They are gathered again, from those that there are on."""
        self._gather_by_hooks()
        for number, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                self.take_over(number, parameter.grad)

    def check(self) -> None:
        """Raise where the step is to be left; what hooks do first."""
        self._check()

    def _place(self, number: int) -> Tensor:
        """Where this gradient is gathered, with a counter of changes of its own."""
        return self.layout.parameters.places[number].alone(self.outgoing)

    def turn_to(self, slot: Tensor, views: list[Tensor]) -> None:
        """The next `collect` or `send` goes to this slot, in memory of the model's device.

        Cheaper than `push_into`, where nobody calls work off and gradients are copied at its end.

        Args:
            views: of the slot, one for each gradient.
        """
        self._slot = self.outgoing = slot
        self._grads = views

    def _copy_out(self, number: int, parameter: Tensor) -> None:
        self._check()
        gradient = parameter.grad
        if gradient is not self._grads[number] and gradient is not None:
            if gradient.requires_grad or self._lent.is_held(number):
                self._leave_to_script().hooked(number, parameter)
                return
            parameter.grad = self._grads[number].copy_(gradient)
        self._left[number] = (self._grads[number]._version, self._left[number][1])
        self._num_hooked += 1

    def _leave_to_script(self) -> OwnGradients:
        """From now on gradients stay where torch makes them: the script keeps them, or their graph.

        Whatever it holds of those before has memory of its own, which nobody writes any more.
        """
        grads = [(number, parameter.grad) for number, parameter in enumerate(self.parameters)]
        left = [
            (number, one)
            for number, one in grads
            if one is not None and self.is_as_left(number, one)
        ]
        lent = [
            number
            for number, one in grads
            if one is self._grads[number] or self._lent.is_held(number)
        ]
        self._lent.give(lent, self._place)
        own = OwnGradients(self)
        own.arrived = lambda _: self._check()
        self.leave_to(own)
        self._are_sent_from_here = True
        for number, one in left:
            own.take_over(number, one)
        return own

    def _leave_if_held(self, number: int) -> None:
        """Before this place, which is no ``.grad`` any more, is written: a script may hold it."""
        if self._own is None and self._lent.is_held(number):
            self._leave_to_script()

    @property
    def num_hooked(self) -> int:
        """Gradients that backward passes have left, wherever they are."""
        return self._num_hooked if self._own is None else self._own.num_hooked

    @property
    def moment(self) -> int:
        """Another one after every gradient that a backward pass leaves; of no other use."""
        return self._num_hooked if self._own is None else self._own.moment

    def is_as_left(self, number: int, gradient: Tensor) -> bool:
        """Whether this ``.grad`` is what a hook, or ``take_over``, has left, as torch counts it."""
        if self._own is not None:
            return self._own.is_as_left(number, gradient)
        version, address = self._left[number]
        return (
            gradient is self._grads[number]
            and gradient._version == version
            and gradient.data_ptr() == address
        )

    def note_edit(self) -> None:
        """The script was allowed to change gradients, in ways that torch need not count."""
        if self._own is not None:
            self._own.note_edit()

    def take_over(self, number: int, gradient: Tensor) -> None:
        """This ``.grad``, changed or replaced by somebody, is what goes out."""
        if gradient is not self._grads[number]:
            self._leave_if_held(number)
        if self._own is not None:
            self._own.take_over(number, gradient)
            return
        view, address = self._grads[number], self._left[number][1]
        if gradient is not view or gradient.data_ptr() != address:
            view = self._place(number)
            self._lent.renew(number, view)
            self.parameters[number].grad = view.copy_(gradient.detach())
        self._left[number] = (view._version, address)

    def summed(self, start: int, stop: int) -> int:
        """The bits of the gradients in these bytes of the layout; nan is one more."""
        if self._own is not None:
            return self._own.summed(start, stop)
        return int(self.outgoing[start:stop].view(torch.int64).sum())

    def _drop_hooks(self) -> None:
        if self._own is not None:
            self._num_hooked = self._own.num_hooked
            self._own.release()
            self._own, self._are_sent_from_here = None, True
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def gather(self, present: memoryview) -> None:
        """Every gradient in its place in ``outgoing``, missing ones zero and marked.

        Where others take them from torch they are marked alone.
        """
        for number, parameter in enumerate(self.parameters):
            gradient = parameter.grad
            if gradient is None:
                if self._are_sent_from_here and (present[number] or parameter.requires_grad):
                    self._leave_if_held(number)
                    self._grads[number].zero_()
                present[number] = 0
                continue
            present[number] = 1
            if gradient is not self._grads[number]:
                self.refuse_sparse(number, gradient)
                if self._are_sent_from_here:
                    self._leave_if_held(number)
                    self._grads[number].copy_(gradient.detach())

    def refuse_sparse(self, number: int, gradient: Tensor) -> None:
        """Raise ConfigError where this parameter's gradient is sparse."""
        if gradient.is_sparse:
            raise ConfigError(
                f"parameter {self.names[number]!r} has a sparse gradient; sparse gradients "
                "cannot be carried: build the embedding with sparse=False"
            )

    def collect(self, present: memoryview) -> None:
        """Make the slot whole: gradients gathered, buffers beside them."""
        self.gather(present)
        self.send()

    def send(self) -> None:
        """Copy what was gathered, and the buffers, into the slot."""
        assert self._slot is not None
        self.held.take_buffers()
        for buffer, place in zip(self.buffers, self.layout.buffers.places, strict=True):
            place.view(self._slot).copy_(buffer)
        if self.outgoing is not self._slot:
            size = self.layout.parameters.stop
            self._slot[:size].copy_(self.outgoing[:size])

    def gather_own(self, block: Tensor, present: memoryview) -> None:
        """Copy every ``.grad``, wherever it lies, into ``block``; mark those there are."""
        for number, (parameter, place) in enumerate(self._placed()):
            gradient = parameter.grad
            present[number] = gradient is not None
            if gradient is None:
                place.view(block).zero_()
                continue
            place.view(block).copy_(gradient.detach())

    def receive(self, block: Tensor, present: Sequence[int]) -> None:
        """Every ``.grad`` from ``block``; None where ``present`` is 0.

        It has no graph, which is of this member's own part.
        """
        for number, (parameter, place) in enumerate(self._placed()):
            if not present[number]:
                parameter.grad = None
            elif parameter.grad is None or parameter.grad.requires_grad:
                parameter.grad = torch.empty_like(parameter).copy_(place.view(block))
            else:
                parameter.grad.copy_(place.view(block))

    def _placed(self) -> Iterator[tuple[nn.Parameter, TensorPlace]]:
        return zip(self.parameters, self.layout.parameters.places, strict=True)

    def scale_gradients(self, factor: float) -> None:
        if self._own is not None:
            for parameter in self.parameters:
                if parameter.grad is not None:
                    parameter.grad.detach().mul_(factor)
            return
        for view in self._grads:
            if view.is_floating_point() or view.is_complex():
                view.mul_(factor)

    def drop_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    # -- hyper-parameters -----------------------------------------------------------------------

    def hyper(self) -> Hyper:
        """The values of the optimizer's groups: lr, momentum, ... (not the parameters)."""
        return hyper_of(self.optimizer)


def hyper_of(optimizer: Optimizer) -> Hyper:
    """The values of its groups: lr, momentum, ... (not the parameters)."""
    return tuple(
        tuple(_number_of(value) for key, value in group.items() if key != "params")
        for group in optimizer.param_groups
    )


def digest_of(settings: object) -> int:
    """32 bits of them; rates that were reached in another order differ in their last digits."""
    return zlib.crc32(_said(settings).encode())


def _said(value: object) -> str:
    if isinstance(value, tuple):
        return f"({','.join(map(_said, value))})"
    if isinstance(value, float):
        return f"{value:.10g}"
    is_plain = value is None or isinstance(value, bool | int | str | list | Tensor)
    return repr(value) if is_plain else type(value).__name__  # else its address is said, too


def _number_of(value: object) -> object:
    """Of a tensor on the CPU, which may be changed in place, what it is now."""
    if isinstance(value, Tensor) and value.ndim == 0 and value.device.type == "cpu":
        return value.item()
    return value


def _nothing() -> None:
    return None


def _only_device(tensors: Sequence[Tensor]) -> torch.device:
    devices = {tensor.device for tensor in tensors}
    if not devices:
        raise ConfigError("the model has no parameters: there is nothing to train")
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise ConfigError(
            f"the model lies on several devices ({names}); a worker's model must lie on one: "
            "model.to(pace.device)"
        )
    return devices.pop()


def refuse_hooks(optimizer: Optimizer) -> None:
    """An update is made by whoever comes last, or by each worker on its share of the parameters."""
    if has_hooks_on_all():
        raise ConfigError(
            "hooks on the steps of all optimizers (register_optimizer_step_post_hook and its like) "
            "were registered since prepare(), and would see a share of the parameters or run in "
            "another worker: register them before pace.prepare(...), which carries them under "
            "full-sync and local-sgd"
        )
    if has_hooks(optimizer):
        raise ConfigError(
            f"{type(optimizer).__name__} has step hooks since prepare(), which would see a share "
            "of the parameters or run in another worker: register them before pace.prepare(...), "
            "which carries them under full-sync and local-sgd; to clip, "
            "pace.clip_grad_norm_(model.parameters(), max_norm)"
        )


def _refuse_whole_numbers(named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """ConfigError where a parameter has no mean over workers, though it may be frozen."""
    for name, parameter in named:
        if not (parameter.is_floating_point() or parameter.is_complex()):
            raise ConfigError(
                f"parameter {name!r} is of {parameter.dtype}, and of whole numbers workers have no "
                "mean; keep it as a buffer: self.register_buffer("
                f"{name.rpartition('.')[2]!r}, tensor)"
            )


def refuse_without_size(model: nn.Module) -> None:
    """ConfigError where a lazy layer has not seen a batch yet: a run lays out what there is."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise ConfigError(
                f"{name!r} of the model has no size yet (nn.Lazy...), and workers share memory of "
                "its size; call the model once with a batch, model(inputs), before its optimizer "
                "is made and before prepare()"
            )


_DISABLE_OBSERVERS = "model.apply(torch.ao.quantization.disable_observer)"


def refuse_observers(model: nn.Module) -> None:
    """ConfigError where a layer of torch's quantization observes a range of numbers.

    The least number of a batch is the least of its parts', and an update has a mean of those. Who
    observes no more has constants.
    """
    modules = dict(model.named_modules())
    for name, module in modules.items():
        if "min_val" not in module._buffers or not _is_observer(type(module)):
            continue
        is_enabled: Any = getattr(modules[name.rpartition(".")[0]], "observer_enabled", None)
        if is_enabled is None or bool(is_enabled[0]):
            way_out = "convert the model" if is_enabled is None else _DISABLE_OBSERVERS
            raise ConfigError(
                f"module {name!r} ({type(module).__name__}) observes the range of its numbers, "
                "which each worker would do of its part, and a mean of ranges is too narrow: "
                f"observe in one process, then {way_out} before prepare(), or train with one worker"
            )


def _is_observer(kind: type[nn.Module]) -> bool:
    """Without an import of torch's quantization, which who has one has made."""
    names = [(one.__module__, one.__name__) for one in kind.__mro__]
    return ("torch.ao.quantization.observer", "ObserverBase") in names


def refuse_shared_memory(model: nn.Module) -> None:
    """ConfigError where two tensors of the model are one memory: a run lays each by itself."""
    found = in_one_memory((*model.named_parameters(), *model.named_buffers()))
    if found is not None:
        one, other = found
        raise ConfigError(
            f"{one!r} and {other!r} of the model share memory and are two objects; in a run each "
            "has memory of its own, and an update of one would not reach the other: where they are "
            "one weight, make them one object (head.weight = embed.weight), else keep one of them "
            "and make the other of it in forward(), or part them: tensor.clone()"
        )


def refuse_another_device(model: nn.Module, device: torch.device) -> None:
    """ConfigError where the whole model lies on another device than batches are moved to.

    To a CPU nobody moves them: they stay where the script's own loader and its ``.to()`` put them.
    """
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1:  # of several, and of none, others speak
        return
    found = devices.pop()
    if found.type == "meta":
        mend = "model.to_empty(device=pace.device), and then its first weights"
    elif device.type == "cpu" or _is_same(found, device):
        return
    else:
        mend = "model.to(pace.device)" + ", or use --device cpu" * (found.type == "cpu")
    raise ConfigError(
        f"the model lies on {found}, and this worker's batches come on {device} (pace.device); "
        f"put it there before its optimizer is made: {mend}"
    )


def _is_same(found: torch.device, device: torch.device) -> bool:
    """Of some kinds (mps) there is one, and a tensor says its number."""
    return found.type == device.type and device.index in (None, found.index)


def refuse_what_cannot_be_carried(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Say by name what no exchange can carry, one worker's included: the script is for all."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ConfigError(
                f"module {name!r} ({type(module).__name__}) makes sparse gradients; they cannot "
                "be carried: build it with sparse=False"
            )
    for name, tensor in (*model.named_buffers(), *model.named_parameters()):
        if tensor.layout is not torch.strided:
            raise ConfigError(
                f"{name!r} of the model is a sparse tensor, and workers share dense memory; where "
                "it is a constant, keep it as a plain attribute: self."
                f"{name.rpartition('.')[2]} = tensor.to(device), without register_buffer"
            )
    known = set(model.parameters())
    for parameter in (held for one in optimizers for held in parameters_of(one)):
        if parameter not in known:
            raise ConfigError(
                f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that is "
                "not the model's; build it from model.parameters() after the model is final"
            )
