"""One member's copy of the model: its parameters, buffers and gradients as flat memory.

The user's objects stay the same; only their memory is moved, so that a pull is one copy and a push
at most one. Post-accumulate hooks copy each gradient into the outgoing slot while it is in the
cache, or leave it where torch made it (`OwnGradients`): for an exchange that reads it there, and
for a script that keeps gradients, or their graph, until the next pass. Above 300 lines with its
checks of models. This module must not know who reads the slot.
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
from .own_gradients import OwnGradients, register, sparse_gradient

Hyper = tuple[tuple[Any, ...], ...]


class Replica:
    """The model and optimizer of one member.

    Args:
        model: any module with at least one trainable parameter, on one device.
        optimizer: the user's, over (some of) the model's parameters.
        rule: the optimizer that the run applies to pushes: the user's, or one that averages.
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
        """Memory that gradients are gathered in, on the model's device; on a CPU the slot."""
        self._grads: list[Tensor] = []
        self._lent = LentPlaces(self._grads)
        self._left: list[tuple[int, int]] = []
        """Per gradient: its version counter when a hook left it, and its address."""
        self._num_hooked = 0
        self._own: OwnGradients | None = None
        """Gradients that stay where torch makes them; None: they are gathered when computed."""
        self._are_sent_from_here = True
        """Whether ``send`` copies those gradients; if not, others read them."""
        self._check: Callable[[], None] = _nothing
        self._handles: list[Any] = []

    # -- parameters -----------------------------------------------------------------------------

    def write_to(self, block: Tensor) -> None:
        """Copy the parameters and buffers into ``block`` (bytes)."""
        places = (*self.layout.parameters.places, *self.layout.buffers.places)
        for tensor, place in zip([*self.parameters, *self.buffers], places, strict=True):
            place.view(block).copy_(tensor.detach())

    def live_in(self, block: Tensor) -> None:
        """Make the parameters views into ``block``; nothing is copied."""
        bind(self.parameters, self.layout.parameters, block)
        self.held.lie_in(block)

    def move_to(self, block: Tensor) -> None:
        """Make parameters and buffers views into ``block``, and free private memory."""
        for buffer, place in zip(self.buffers, self.layout.buffers.places, strict=True):
            place.view(block).copy_(buffer)
        self._let_buffers_live_in(block)
        self.live_in(block)
        self._home = None

    def live_alone(self) -> Tensor:
        """Make parameters and buffers views into private memory, which is returned."""
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
        """A checksum of the parameters' values."""
        checksum = 0
        for parameter in self.parameters:
            values = parameter.detach().cpu().contiguous().reshape(-1)
            checksum = zlib.crc32(values.view(torch.uint8).numpy().data, checksum)
        return checksum

    def release(self) -> None:
        """Give parameters, buffers and gradients memory of their own, with their values."""
        self._drop_hooks()
        for tensor in (*self.parameters, *self.model.buffers()):
            tensor.data = tensor.detach().clone()
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.detach().clone()

    # -- gradients ------------------------------------------------------------------------------

    def push_into(self, slot: Tensor, check: Callable[[], None]) -> None:
        """Copy gradients into ``slot`` from now on, when they are computed.

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
        old_grads, self._grads, self._left = self._grads, [], []
        self._lent = LentPlaces(self._grads)
        for number, parameter in enumerate(self.parameters):
            view = self._place(number)
            self._grads.append(view)
            self._lent.add(view)
            if old_grads and parameter.grad is old_grads[number]:
                parameter.grad = view.copy_(old_grads[number])
            self._left.append((view._version, view.data_ptr()))
        if self._own is None or not self._are_sent_from_here:
            self._gather_by_hooks()

    def _gather_by_hooks(self) -> None:
        self._drop_hooks()
        for number, parameter in enumerate(self.parameters):
            if parameter.is_floating_point() or parameter.is_complex():
                self._handles.append(register(parameter, self._copy_out, number))

    def leave_to(self, own: OwnGradients) -> None:
        """Leave gradients where torch makes them from now on; the owner of ``own`` reads them."""
        self._drop_hooks()
        self._own, self._are_sent_from_here = own, False

    def gather_anew(self) -> None:
        """Gather gradients again, beginning with the current ones."""
        self._gather_by_hooks()
        for number, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                self.take_over(number, parameter.grad)

    def check(self) -> None:
        """Raise an error if the step must be left; hooks call this first."""
        self._check()

    def _place(self, number: int) -> Tensor:
        """The memory where this gradient is gathered, with its own version counter."""
        return self.layout.parameters.places[number].alone(self.outgoing)

    def turn_to(self, slot: Tensor, views: list[Tensor]) -> None:
        """Direct the next `collect` or `send` to this slot, in memory of the model's device.

        Cheaper than `push_into`, if work is never cancelled and gradients are copied at its end.

        Args:
            views: of the slot, one for each gradient.
        """
        self._slot = self.outgoing = slot
        self._grads = views

    def _copy_out(self, number: int, parameter: Tensor) -> None:
        self._check()
        gradient = parameter.grad
        if gradient is not self._grads[number] and gradient is not None:
            if gradient.is_sparse:
                raise sparse_gradient(self.names[number])
            if gradient.requires_grad or self._lent.is_held(number):
                self._leave_to_script().hooked(number, parameter)
                return
            parameter.grad = self._grads[number].copy_(gradient)
        self._left[number] = (self._grads[number]._version, self._left[number][1])
        self._num_hooked += 1

    def _leave_to_script(self) -> OwnGradients:
        """Leave gradients where torch makes them: the script keeps them, or their graph.

        Gradients that it already holds get memory of their own, which is not written any more.
        """
        grads = [(number, parameter.grad) for number, parameter in enumerate(self.parameters)]
        left = [
            (number, gradient)
            for number, gradient in grads
            if gradient is not None and self.is_as_left(number, gradient)
        ]
        lent = [
            number
            for number, gradient in grads
            if gradient is self._grads[number] or self._lent.is_held(number)
        ]
        self._lent.give(lent, self._place)
        own = OwnGradients(self)
        own.arrived = lambda _: self._check()
        self.leave_to(own)
        self._are_sent_from_here = True
        for number, gradient in left:
            own.take_over(number, gradient)
        return own

    def _leave_if_held(self, number: int) -> None:
        """Give up a place that is about to be written, if the script still holds it."""
        if self._own is None and self._lent.is_held(number):
            self._leave_to_script()

    @property
    def num_hooked(self) -> int:
        """The number of gradients that backward passes have left."""
        return self._num_hooked if self._own is None else self._own.num_hooked

    @property
    def moment(self) -> int:
        """A token that changes with every gradient that a backward pass leaves."""
        return self._num_hooked if self._own is None else self._own.moment

    def is_as_left(self, number: int, gradient: Tensor) -> bool:
        """Whether ``.grad`` is unchanged, by torch's count, since a hook or ``take_over``."""
        if self._own is not None:
            return self._own.is_as_left(number, gradient)
        version, address = self._left[number]
        return (
            gradient is self._grads[number]
            and gradient._version == version
            and gradient.data_ptr() == address
        )

    def note_edit(self) -> None:
        """Note that the script may have changed gradients in ways that torch does not count."""
        if self._own is not None:
            self._own.note_edit()

    def take_over(self, number: int, gradient: Tensor) -> None:
        """Send this ``.grad``, which was changed or replaced."""
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
        """The sum of the gradients' bits, as integers, in these bytes of the layout."""
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
        """Copy every gradient to its place in ``outgoing``; missing ones are zero and marked.

        Gradients that others read where torch makes them are only marked.
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
        """Raise ConfigError if this parameter's gradient is sparse."""
        if gradient.is_sparse:
            raise sparse_gradient(self.names[number])

    def collect(self, present: memoryview) -> None:
        """Fill the slot: gather the gradients, and add the buffers."""
        self.gather(present)
        self.send()

    def send(self) -> None:
        """Copy the gathered gradients, and the buffers, into the slot."""
        assert self._slot is not None
        self.held.take_buffers()
        for buffer, place in zip(self.buffers, self.layout.buffers.places, strict=True):
            place.view(self._slot).copy_(buffer)
        if self.outgoing is not self._slot:
            size = self.layout.parameters.stop
            self._slot[:size].copy_(self.outgoing[:size])

    def gather_own(self, block: Tensor, present: memoryview) -> None:
        """Copy every ``.grad``, wherever it is, into ``block``; mark those that exist."""
        for number, (parameter, place) in enumerate(self._placed()):
            gradient = parameter.grad
            present[number] = gradient is not None
            if gradient is None:
                place.view(block).zero_()
                continue
            place.view(block).copy_(gradient.detach())

    def receive(self, block: Tensor, present: Sequence[int]) -> None:
        """Set every ``.grad`` from ``block``; None where ``present`` is 0.

        The gradients have no graph: a graph covers only this member's part.
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
    """The values of the optimizer's groups: lr, momentum, ... (not the parameters)."""
    return tuple(
        tuple(_number_of(value) for key, value in group.items() if key != "params")
        for group in optimizer.param_groups
    )


def digest_of(settings: object) -> int:
    """Return a 32-bit digest of settings; floats are rounded, as their last digits may differ."""
    return zlib.crc32(_text(settings).encode())


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return f"({','.join(map(_text, value))})"
    if isinstance(value, float):
        return f"{value:.10g}"
    is_plain = value is None or isinstance(value, bool | int | str | list | Tensor)
    return repr(value) if is_plain else type(value).__name__  # a repr may contain an address


def _number_of(value: object) -> object:
    """The value of a scalar tensor on the CPU, which may change in place; others as they are."""
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
            f"the model is on several devices ({names}), but a worker's model must be on one: "
            "model.to(pace.device)"
        )
    return devices.pop()


def refuse_hooks(optimizer: Optimizer) -> None:
    """Raise ConfigError for step hooks: a worker steps a share of the parameters, or nothing."""
    if has_hooks_on_all():
        raise ConfigError(
            "hooks on the steps of all optimizers (such as register_optimizer_step_post_hook) were "
            "registered after prepare(), and would see a share of the parameters or run in "
            "another worker: register them before pace.prepare(...), which supports them under "
            "full-sync and local-sgd"
        )
    if has_hooks(optimizer):
        raise ConfigError(
            f"{type(optimizer).__name__} got step hooks after prepare(), which would see a share "
            "of the parameters or run in another worker: register them before pace.prepare(...), "
            "which supports them under full-sync and local-sgd; to clip, "
            "pace.clip_grad_norm_(model.parameters(), max_norm)"
        )


def _refuse_whole_numbers(named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Raise ConfigError for integer parameters, also frozen ones: they have no mean."""
    for name, parameter in named:
        if not (parameter.is_floating_point() or parameter.is_complex()):
            raise ConfigError(
                f"parameter {name!r} is of {parameter.dtype}, but workers cannot average whole "
                "numbers; keep it as a buffer: self.register_buffer("
                f"{name.rpartition('.')[2]!r}, tensor)"
            )


def refuse_without_size(model: nn.Module) -> None:
    """Raise ConfigError if a lazy layer has not seen a batch yet: a run needs all sizes."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise ConfigError(
                f"{name!r} of the model has no size yet (nn.Lazy...), but workers share memory of "
                "its size; call the model once with a batch, model(inputs), before its optimizer "
                "is made and before prepare()"
            )


_DISABLE_OBSERVERS = "model.apply(torch.ao.quantization.disable_observer)"


def refuse_observers(model: nn.Module) -> None:
    """Raise ConfigError if a layer of torch's quantization observes a range of values.

    The minimum of a batch is the minimum over its parts, but an update averages these. A layer that
    no longer observes has constants.
    """
    modules = dict(model.named_modules())
    for name, module in modules.items():
        if "min_val" not in module._buffers or not _is_observer(type(module)):
            continue
        is_enabled: Any = getattr(modules[name.rpartition(".")[0]], "observer_enabled", None)
        if is_enabled is None or bool(is_enabled[0]):
            remedy = "convert the model" if is_enabled is None else _DISABLE_OBSERVERS
            raise ConfigError(
                f"module {name!r} ({type(module).__name__}) observes the range of its values, "
                "which each worker would do for its part, and a mean of ranges is too narrow: "
                f"observe in one process, then {remedy} before prepare(), or train with one worker"
            )


def _is_observer(kind: type[nn.Module]) -> bool:
    """Whether a class is an observer, without importing torch's quantization."""
    names = [(base.__module__, base.__name__) for base in kind.__mro__]
    return ("torch.ao.quantization.observer", "ObserverBase") in names


def refuse_shared_memory(model: nn.Module) -> None:
    """Raise ConfigError if two tensors of the model share memory: a run separates them."""
    names = in_one_memory((*model.named_parameters(), *model.named_buffers()))
    if names is not None:
        first, second = names
        raise ConfigError(
            f"{first!r} and {second!r} of the model share memory but are two objects; in a run "
            "each has memory of its own, and an update of one would not reach the other: if they "
            "are one weight, make them one object (head.weight = embed.weight), else keep one of "
            "them and derive the other in forward(), or separate them: tensor.clone()"
        )


def refuse_another_device(model: nn.Module, device: torch.device) -> None:
    """Raise ConfigError if the model is on another device than batches are moved to.

    Batches are not moved to a CPU: they stay where the script's own loader and ``.to()`` put them.
    """
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1:  # several, or none, are refused elsewhere
        return
    current = devices.pop()
    if current.type == "meta":
        remedy = "model.to_empty(device=pace.device), and then its first weights"
    elif device.type == "cpu" or _is_same(current, device):
        return
    else:
        remedy = "model.to(pace.device)" + ", or paceline launch --device cpu" * (
            current.type == "cpu"
        )
    raise ConfigError(
        f"the model is on {current}, but this worker's batches are on {device} (pace.device); "
        f"move it there before its optimizer is made: {remedy}"
    )


def _is_same(current: torch.device, device: torch.device) -> bool:
    """Whether the devices are equal; ``device`` may have no index (mps)."""
    return current.type == device.type and device.index in (None, current.index)


def refuse_what_cannot_be_carried(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Raise ConfigError for what no exchange supports; also with one worker, for portability."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ConfigError(
                f"module {name!r} ({type(module).__name__}) makes sparse gradients, which are not "
                "supported: build it with sparse=False"
            )
    for name, tensor in (*model.named_buffers(), *model.named_parameters()):
        if tensor.layout is not torch.strided:
            raise ConfigError(
                f"{name!r} of the model is a sparse tensor, but workers share dense memory; if "
                "it is a constant, keep it as a plain attribute: self."
                f"{name.rpartition('.')[2]} = tensor.to(device), without register_buffer"
            )
    known = set(model.parameters())
    for parameter in (
        parameter for optimizer in optimizers for parameter in parameters_of(optimizer)
    ):
        if parameter not in known:
            raise ConfigError(
                f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is "
                "not the model's; build it from model.parameters() after the model is final"
            )
