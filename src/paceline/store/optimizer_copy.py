"""The user's optimizer once more: the same class and settings over other parameters.

A twin is what the store steps with, and what a trial step finds out: the state that the optimizer
will keep. Torch's own optimizers are stepped by their one-pass kernels and without the wrappers
around ``step``, which cost more than a small update. A class of the user's own is tried likewise,
for what a twin would not have: numbers that its steps keep elsewhere than in ``state``, and what
they read of other parameters. Above 300 lines, since each question of an optimizer is answered by
a twin of it. This module must not know blocks or updates.
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from ..errors import ConfigError
from .joint import JointOptimizer, parameters_of, parts_of

ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in (
        "SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam",
        "ASGD", "Rprop",
    )
)  # fmt: skip
"""Exact classes whose update of an element depends on that element alone."""

FUSED = frozenset((torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad))
"""Exact classes that torch has a kernel for that updates in one pass on the CPU."""

EXISTS = "exists"
"""A state entry of one byte: whether the optimizer has made this parameter's state yet."""

_TWIN = "is_paceline_twin"
_KERNELS = ("capturable", "fused", "foreach")
"""What a twin chooses by itself: how it computes, not what."""

StateRow = tuple[int, str, Tensor, bool]


def is_elementwise(optimizer: Optimizer) -> bool:
    return all(type(one) in ELEMENTWISE for one in parts_of(optimizer))


def keeps_gradients(optimizer: Optimizer) -> bool:
    """Whether its step surely leaves ``.grad`` as it is: that of torch's own, without hooks."""
    return is_elementwise(optimizer) and not has_hooks(optimizer)


def has_hooks(optimizer: Optimizer) -> bool:
    """Whether something is called before or after each of its steps."""
    return has_hooks_on_all() or any(
        one._optimizer_step_pre_hooks or one._optimizer_step_post_hooks
        for one in parts_of(optimizer)
    )


def has_hooks_on_all() -> bool:
    """Whether something of others is called around each step of whatever optimizer."""
    every = (*_global_optimizer_pre_hooks.values(), *_global_optimizer_post_hooks.values())
    return any(not getattr(one, "__module__", "").startswith("paceline.") for one in every)


def state_rows(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> list[StateRow]:
    """What the optimizer will keep for each parameter, found by a step on a copy of its kind.

    Raises:
        ConfigError: the optimizer needs a closure or more than gradients, or keeps state that
            cannot be shared.
    """
    number_of = {parameter: i for i, parameter in enumerate(parameters)}
    rows: list[StateRow] = []
    every = [(one, group) for one in parts_of(optimizer) for group in one.param_groups]
    for one, group in every:
        for parameter in group["params"]:
            state = _trial_state(one, group, parameter)
            rows.append((number_of[parameter], EXISTS, torch.zeros(1, dtype=torch.uint8), False))
            for key, value in state.items():
                like = _like(parameter, value) if _is_as_large(value, parameter) else value
                rows += _row(one, number_of[parameter], key, like)
    return rows


def _is_as_large(value: Any, parameter: Any) -> bool:
    """Whether a part of the state has an element for each of the parameter."""
    is_dense = isinstance(value, Tensor) and value.layout is torch.strided
    return is_dense and isinstance(parameter, Tensor) and value.shape == parameter.shape


def _like(parameter: Tensor, value: Tensor, device: torch.device | str = "meta") -> Tensor:
    """In the memory order of the parameter: kernels, and owners of a piece, go through both.

    State that was loaded has the order of the model that it was saved from.
    """
    return torch.empty_like(parameter, dtype=value.dtype, device=device)


def order_as_parameters(optimizer: Optimizer) -> None:
    """Lay what an optimizer keeps for its parameters in memory as they lie themselves.

    A kernel that makes the whole update in one pass looks at no strides (torch 2.13, on a CPU).
    """
    for parameter in parameters_of(optimizer):
        state = optimizer.state.get(parameter, {})
        for key, value in state.items():
            if _is_as_large(value, parameter) and value.stride() != parameter.stride():
                state[key] = _like(parameter, value, value.device).copy_(value)


def _row(optimizer: Optimizer, number: int, key: str, value: object) -> list[StateRow]:
    if isinstance(value, Tensor):
        return [(number, key, value, False)]
    if isinstance(value, bool | int | float):
        return [(number, key, torch.zeros(1, dtype=torch.float64), True)]
    if value is None:
        return []
    raise ConfigError(
        f"{type(optimizer).__name__} keeps {key!r} of type {type(value).__name__} for each "
        "parameter; tensors and numbers can be shared between workers, this cannot"
    )


def _trial_state(
    optimizer: Optimizer, group: Mapping[str, Any], parameter: nn.Parameter
) -> dict[str, Any]:
    """The state after one step with a zero gradient on a copy of ``parameter``."""
    if optimizer.state.get(parameter):
        return dict(optimizer.state[parameter])
    trial = nn.Parameter(torch.zeros_like(parameter, device="cpu"))
    trial.grad = torch.zeros_like(trial)
    twin = make_twin(optimizer, [{**group, "params": [trial]}])
    try:
        with torch.random.fork_rng(devices=[]):  # some draw noise
            type(twin).step(twin)
    except TypeError as error:
        raise ConfigError(
            f"{type(optimizer).__name__}.step cannot be called without arguments ({error}); "
            "one that calls the model again inside its step is carried under full-sync and "
            "local-sgd, where prepare is told so: pace.prepare(..., closures=True)"
        ) from None
    except Exception as error:  # code of the user's
        raise ConfigError(
            f"{type(optimizer).__name__}.step cannot be made on a copy of a parameter with a zero "
            f"gradient ({type(error).__name__}: {error}), and what it needs beside .grad (a graph, "
            "what a layer has seen) is not carried; under local-sgd each worker steps its own: "
            "--protocol local-sgd:1"
        ) from error
    return dict(twin.state.get(trial, {}))


def own_memory(optimizer: Optimizer) -> str:
    """Where steps of a class of the user's own keep numbers beside ``state``; empty: nowhere.

    As ``group['t'] += 1`` or ``self.t += 1``: each twin would have its own, or none. So it is with
    keys of the state that the second or third step makes.
    """
    return next((found for one in _own_parts(optimizer) if (found := _memory_of(one))), "")


def is_made_late(memory: str) -> bool:
    """Whether what ``own_memory`` found lies in ``state``, and not from the first step on."""
    return memory.startswith("self.state[p]")


def reads_others(optimizer: Optimizer) -> bool:
    """Whether a step of the user's own on one parameter reads others', as a norm of all does."""
    return any(_first_is_moved_by_others(one) for one in _own_parts(optimizer))


def inner_of(optimizer: Optimizer) -> str:
    """The attribute in which a class of the user's own holds another optimizer; empty: none does.

    A twin would have the user's own there, which steps the user's own parameters.
    """
    for name, value in optimizer.__dict__.items():
        held = [*(value.values() if isinstance(value, dict) else ())]
        held += value if isinstance(value, list | tuple) else [value]
        if any(isinstance(one, Optimizer) and one is not optimizer for one in held):
            return f"self.{name}"
    return ""


def _steps_alone(optimizer: Optimizer) -> bool:
    """Whether its step needs no closure; an optimizer inside, which has the user's own parameters,
    finds no gradient there meanwhile."""
    held = [one for group in optimizer.param_groups for one in group["params"]]
    gradients = [one.grad for one in held]
    for one in held:
        one.grad = None
    try:
        return _stepped(optimizer, is_alone=False)[0] is not None
    finally:
        for one, gradient in zip(held, gradients, strict=True):
            one.grad = gradient


def _own_parts(optimizer: Optimizer) -> list[Optimizer]:
    return [
        one for one in parts_of(optimizer) if not type(one).__module__.startswith("torch.optim.")
    ]


def _memory_of(optimizer: Optimizer) -> str:
    if inner := inner_of(optimizer):
        return inner if _steps_alone(optimizer) else ""
    twin, _ = _stepped(optimizer, is_alone=False)
    if twin is None:
        return ""
    for before, after in zip(optimizer.param_groups, twin.param_groups, strict=True):
        for key in sorted(after.keys() - {"params", *_KERNELS}):
            if key not in before or not _is_equal(before[key], after[key]):
                return f"group[{key!r}]"
    for owner in twin.state:
        if not isinstance(owner, Tensor):
            return f"self.state[{owner!r}]"
    for name in sorted(twin.__dict__.keys() - {"state", "param_groups", _TWIN}):
        before, after = optimizer.__dict__.get(name, twin), twin.__dict__[name]
        if before is twin or not _is_equal(before, after):
            return f"self.{name}"
    return _made_later(optimizer, twin)


def _made_later(optimizer: Optimizer, twin: Optimizer) -> str:
    """What steps that come later than the first add to the state; the trial of a layout has one."""
    first, _ = _stepped(optimizer, is_alone=False, num_steps=1)
    if first is None:
        return ""
    known = {key for state in optimizer.state.values() if isinstance(state, dict) for key in state}
    for once, now in zip(parameters_of(first), parameters_of(twin), strict=True):
        begun = {key for key, value in first.state.get(once, {}).items() if value is not None}
        for key, value in twin.state.get(now, {}).items():
            if value is not None and key not in begun | known:
                return f"self.state[p][{key!r}]"
    return ""


def _first_is_moved_by_others(optimizer: Optimizer) -> bool:
    together, first = _stepped(optimizer, is_alone=False)
    if together is None:
        return False
    alone, other = _stepped(optimizer, is_alone=True)
    return alone is None or not torch.allclose(first, other, rtol=1e-4, equal_nan=True)


def _stepped(
    optimizer: Optimizer, *, is_alone: bool, num_steps: int = 3
) -> tuple[Optimizer | None, Tensor]:
    """Steps on copies of each group's smallest parameters, and what the first has become.

    Args:
        is_alone: only the first of them, all other groups without any.

    Returns:
        None: a step cannot be made like this.
    """
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        held = sorted(group["params"], key=Tensor.numel)[:2]
        copies = [one.detach().to("cpu", copy=True) for one in held]
        if is_alone:
            copies = [] if any(one["params"] for one in groups) else copies[:1]
        rest = {key: _copied(value) for key, value in group.items() if key != "params"}
        groups.append({**rest, "params": [nn.Parameter(one) for one in copies]})
    every = [one for group in groups for one in group["params"]]
    twin = make_twin(optimizer, groups)
    for name, value in twin.__dict__.items():
        if name not in ("state", "param_groups"):
            twin.__dict__[name] = _copied(value)
    rngs = [torch.Generator().manual_seed(number) for number in range(len(every))]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for _ in range(num_steps):
            for one, rng in zip(every, rngs, strict=True):
                one.grad = 100 * torch.randn(one.shape, generator=rng).to(one.dtype)
            try:
                type(twin).step(twin)
            except Exception:  # code of the user's: what prepare tries next says what is wrong
                return None, torch.empty(0)
    return twin, every[0].detach()


def _copied(value: Any) -> Any:
    """So that a trial changes nothing of the user's: tensors and plain containers of its own."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, list | dict | set):
        return copy.copy(value)
    return value


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, float) and isinstance(other, float) and one != one:
        return other != other
    try:
        return one is other or bool(one == other)
    except (RuntimeError, TypeError, ValueError):  # a tensor in a list, an array
        return False


def make_twin(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """An optimizer of this class with its attributes, over other parameters, without state."""
    if isinstance(optimizer, JointOptimizer):
        return _joint_twin(optimizer, groups)
    twin: Optimizer = object.__new__(type(optimizer))
    private = {
        "step", "zero_grad", "state_dict", "load_state_dict", "add_param_group", "state",
        "param_groups",
    }  # fmt: skip
    for name, value in optimizer.__dict__.items():
        if name not in private:
            twin.__dict__[name] = copy.copy(value) if isinstance(value, dict) else value
    twin.__dict__[_TWIN] = True
    twin.__dict__["state"] = defaultdict(dict)
    twin.__dict__["param_groups"] = groups
    for group in groups:
        if group.get("capturable"):
            group["capturable"] = False
        if _may_fuse(optimizer, group):
            group["fused"] = True
    return twin


def _joint_twin(optimizer: JointOptimizer, groups: list[dict[str, Any]]) -> JointOptimizer:
    """A twin of each part, over its groups; they keep their state in one place."""
    parts, rest, state = [], list(groups), defaultdict[Any, Any](dict)
    for one in optimizer.parts:
        count = len(one.param_groups)
        parts.append(make_twin(one, rest[:count]))
        parts[-1].state, rest = state, rest[count:]
    return JointOptimizer(parts, state)


def is_twin(optimizer: Optimizer) -> bool:
    """Whether it was made here."""
    return _TWIN in optimizer.__dict__


@dataclass(frozen=True, slots=True)
class TwinPart:
    """The twin of one of several optimizers, or of the only one.

    Attributes:
        numbers: of all parameters that its optimizer steps; the twin may have a share of them.
        fused: its groups whose kernel is torch's one-pass SGD.
    """

    twin: Optimizer
    bare: Callable[[Optimizer], object]
    numbers: Sequence[int]
    fused: Sequence[dict[str, Any]]

    def choose_kernels(self) -> None:
        """Torch's one-pass SGD only where it can be."""
        for group in self.fused:
            held = [one for one in group["params"] if one.grad is not None]
            group["fused"] = not _has_mixed_momentum(self.twin, held)

    def step(self, factor: float) -> None:
        """A step on ``factor`` times the gradients; who does it again finds them as they were."""
        for parameter in parameters_of(self.twin) if factor != 1.0 else ():
            if parameter.grad is not None:
                parameter.grad = parameter.grad * factor
        with torch.no_grad():
            self.bare(self.twin)


def _has_mixed_momentum(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> bool:
    """Whether some of these have momentum, and others have none yet.

    One whose gradient comes later than the others', as when a layer thaws, has none; torch's
    one-pass SGD takes what all have or none has (torch 2.13).
    """
    state = optimizer.state
    return len({state.get(one, {}).get("momentum_buffer") is not None for one in parameters}) > 1


def too_mixed_to_fuse(optimizer: Optimizer, *, has_closure: bool) -> list[int]:
    """Numbers of groups of torch's SGD whose one-pass kernel cannot make the step that comes.

    Args:
        has_closure: whether the step finds out itself which parameters have gradients.
    """
    if type(optimizer) is not torch.optim.SGD:
        return []
    return [
        number
        for number, group in enumerate(optimizer.param_groups)
        if group.get("fused")
        and _has_mixed_momentum(
            optimizer, (one for one in group["params"] if has_closure or one.grad is not None)
        )
    ]


def twin_parts(
    optimizer: Optimizer, twin: Optimizer, number_of: Mapping[nn.Parameter, int]
) -> list[TwinPart]:
    """What a twin is made of, and of each part the numbers of its parameters."""
    return [
        TwinPart(
            twin=part,
            bare=bare_step(one),
            numbers=[number_of[held] for held in parameters_of(one)],
            fused=[
                group
                for group in part.param_groups
                if type(one) is torch.optim.SGD and group.get("fused")
            ],
        )
        for one, part in zip(parts_of(optimizer), parts_of(twin), strict=True)
    ]


def bare_step(optimizer: Optimizer) -> Callable[[Optimizer], object]:
    """The class's ``step``; torch's own without its wrappers, which cost more than a small update.

    They call hooks, of which there must be none then, and mark the profile.
    """
    step: Any = type(optimizer).step
    if keeps_gradients(optimizer):
        while hasattr(step, "__wrapped__"):
            step = step.__wrapped__
    bare: Callable[[Optimizer], object] = step
    return bare


def _may_fuse(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether torch's one-pass kernel computes this group: the same rule, a third of the time."""
    is_free = group.get("fused") is None and group.get("foreach") is None
    return (
        type(optimizer) in FUSED
        and is_free
        and not group.get("differentiable")
        and not isinstance(group.get("lr"), Tensor)
        and all(parameter.is_floating_point() for parameter in group["params"])
    )
