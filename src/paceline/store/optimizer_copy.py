"""Twins of the user's optimizer: the same class and settings over other parameters.

The store steps with a twin, and a trial step of a twin shows the state that the optimizer will
keep. Torch's own optimizers are stepped by their one-pass kernels and without the wrappers around
``step``, which cost more than a small update. A user's own class is tried for what a twin would not
have: numbers that its steps keep outside ``state``, and values of other parameters that they read.
Above 300 lines, since each question about an optimizer is answered by a twin of it. This module
must not know blocks or updates.
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, Rprop
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
"""Exact classes for which torch has a one-pass kernel on the CPU."""

EXISTS = "exists"
"""A state entry of one byte: whether the optimizer has made this parameter's state."""

REPLACED = ("step", "zero_grad", "state_dict", "load_state_dict", "add_param_group")
"""Methods that schedulers and runs replace on one optimizer: on a copy they would reach it."""

_TWIN = "is_paceline_twin"
_SAME = 1e-4
"""The share of a movement that sums in another order may change."""
_KERNELS = ("capturable", "fused", "foreach")
"""Settings that a twin chooses itself: how it computes, not what."""

StateRow = tuple[int, str, Tensor, bool]


def is_elementwise(optimizer: Optimizer) -> bool:
    return all(type(part) in ELEMENTWISE for part in parts_of(optimizer))


def keeps_gradients(optimizer: Optimizer) -> bool:
    """Whether its step certainly leaves ``.grad`` unchanged: torch's own, without hooks, and none
    that computes in ``.grad`` with ``foreach`` (SGD with nesterov, Rprop; torch 2.13)."""
    is_in_place = any(
        group.get("foreach") and (group.get("nesterov") or type(part) is Rprop)
        for part in parts_of(optimizer)
        for group in part.param_groups
    )
    return is_elementwise(optimizer) and not is_in_place and not has_hooks(optimizer)


def has_hooks(optimizer: Optimizer) -> bool:
    """Whether it has hooks before or after its steps."""
    return has_hooks_on_all() or any(
        part._optimizer_step_pre_hooks or part._optimizer_step_post_hooks
        for part in parts_of(optimizer)
    )


def has_hooks_on_all() -> bool:
    """Whether there are hooks, other than Paceline's, on the steps of all optimizers."""
    hooks = (*_global_optimizer_pre_hooks.values(), *_global_optimizer_post_hooks.values())
    return any(not getattr(hook, "__module__", "").startswith("paceline.") for hook in hooks)


def state_rows(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> list[StateRow]:
    """The state that the optimizer will keep for each parameter, found by a step of a twin.

    Raises:
        ConfigError: the optimizer needs a closure or more than gradients, or keeps state that
            cannot be shared.
    """
    number_of = {parameter: i for i, parameter in enumerate(parameters)}
    rows: list[StateRow] = []
    groups = [(part, group) for part in parts_of(optimizer) for group in part.param_groups]
    for part, group in groups:
        for parameter in group["params"]:
            state = _trial_state(part, group, parameter)
            rows.append((number_of[parameter], EXISTS, torch.zeros(1, dtype=torch.uint8), False))
            for key, value in state.items():
                like = _like(parameter, value) if _is_as_large(value, parameter) else value
                rows += _row(part, number_of[parameter], key, like)
    return rows


def _is_as_large(value: Any, parameter: Any) -> bool:
    """Whether a state entry has the parameter's shape."""
    is_dense = isinstance(value, Tensor) and value.layout is torch.strided
    return is_dense and isinstance(parameter, Tensor) and value.shape == parameter.shape


def _like(parameter: Tensor, value: Tensor, device: torch.device | str = "meta") -> Tensor:
    """An empty tensor for a state entry, in the parameter's memory order.

    Kernels and owners of a piece traverse both; loaded state has the order of the saved model.
    """
    return torch.empty_like(parameter, dtype=value.dtype, device=device)


def order_as_parameters(optimizer: Optimizer) -> None:
    """Give an optimizer's state the memory order of its parameters.

    One-pass kernels ignore strides (torch 2.13, on a CPU).
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
        with torch.random.fork_rng(devices=[]):  # some steps draw noise
            type(twin).step(twin)
    except TypeError as error:
        raise ConfigError(
            f"{type(optimizer).__name__}.step cannot be called without arguments ({error}); "
            "a step that calls the model again is supported under full-sync and local-sgd, with "
            "pace.prepare(..., closures=True)"
        ) from None
    except Exception as error:  # code of the user's
        raise ConfigError(
            f"{type(optimizer).__name__}.step cannot be made on a copy of a parameter with a zero "
            f"gradient ({type(error).__name__}: {error}), and what it needs besides .grad (a "
            "graph, inputs of a layer) is not shared; under local-sgd each worker steps its own "
            "optimizer: --protocol local-sgd:1"
        ) from error
    return dict(twin.state.get(trial, {}))


def own_memory(optimizer: Optimizer) -> str:
    """Where steps of a user's own class keep numbers outside ``state``; empty: nowhere.

    Such as ``group['t'] += 1`` or ``self.t += 1``: each twin would have its own, or none. The same
    holds for keys of the state that are made in the second or third step.
    """
    return next((place for part in _own_parts(optimizer) if (place := _memory_of(part))), "")


def is_made_late(memory: str) -> bool:
    """Whether the result of ``own_memory`` is in ``state``, but not from the first step on."""
    return memory.startswith("self.state[p]")


def reads_others(optimizer: Optimizer) -> bool:
    """Whether a user's own step on one parameter reads others, as for a norm of all."""
    return any(_first_is_moved_by_others(part) for part in _own_parts(optimizer))


def inner_of(optimizer: Optimizer) -> str:
    """The attribute in which a user's own class holds another optimizer; empty: none.

    A twin would share that optimizer, which steps the user's own parameters.
    """
    for name, value in optimizer.__dict__.items():
        values = [*(value.values() if isinstance(value, dict) else ())]
        values += value if isinstance(value, list | tuple) else [value]
        if any(isinstance(inner, Optimizer) and inner is not optimizer for inner in values):
            return f"self.{name}"
    return ""


def _steps_alone(optimizer: Optimizer) -> bool:
    """Whether its step needs no closure.

    The user's own gradients are removed meanwhile, since an inner optimizer would step with them.
    """
    parameters = parameters_of(optimizer)
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        return _stepped(optimizer, is_alone=False)[0] is not None
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


def _own_parts(optimizer: Optimizer) -> list[Optimizer]:
    return [
        part for part in parts_of(optimizer) if not type(part).__module__.startswith("torch.optim.")
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
    """A state key that is made after the first step; the trial for a layout has only one step."""
    first, _ = _stepped(optimizer, is_alone=False, num_steps=1)
    if first is None:
        return ""
    known = {key for state in optimizer.state.values() if isinstance(state, dict) for key in state}
    for early, late in zip(parameters_of(first), parameters_of(twin), strict=True):
        initial = {key for key, value in first.state.get(early, {}).items() if value is not None}
        for key, value in twin.state.get(late, {}).items():
            if value is not None and key not in initial | known:
                return f"self.state[p][{key!r}]"
    return ""


def _first_is_moved_by_others(optimizer: Optimizer) -> bool:
    """Whether its movement differs; a weight of 1 hides that of a small learning rate."""
    for dtype in (torch.float64, None):
        together, moved = _stepped(optimizer, is_alone=False, dtype=dtype)
        if together is not None:
            break
    else:
        return False
    alone, moved_alone = _stepped(optimizer, is_alone=True, dtype=dtype)
    finite = moved_alone[moved_alone.isfinite()].abs()
    least = _SAME * float(finite.max()) if finite.numel() else 0.0
    return alone is None or not torch.allclose(
        moved, moved_alone, rtol=_SAME, atol=least, equal_nan=True
    )


def _stepped(
    optimizer: Optimizer,
    *,
    is_alone: bool,
    num_steps: int = 3,
    dtype: torch.dtype | None = None,
) -> tuple[Optimizer | None, Tensor]:
    """Step a twin on copies of each group's smallest parameters.

    Args:
        is_alone: only the first of them; all other groups are empty.
        dtype: of the copies, if they are real; None: their own.

    Returns:
        The twin, or None if the step fails; and how far the first parameter was moved.
    """
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        smallest = sorted(group["params"], key=Tensor.numel)[:2]
        copies = [
            parameter.detach().to(
                "cpu", dtype if parameter.is_floating_point() else None, copy=True
            )
            for parameter in smallest
        ]
        if is_alone:
            copies = [] if any(other["params"] for other in groups) else copies[:1]
        rest = {key: _copied(value) for key, value in group.items() if key != "params"}
        groups.append({**rest, "params": [nn.Parameter(value) for value in copies]})
    parameters = [parameter for group in groups for parameter in group["params"]]
    start = parameters[0].detach().clone()
    twin = make_twin(optimizer, groups)
    for name, value in twin.__dict__.items():
        if name not in ("state", "param_groups"):
            twin.__dict__[name] = _copied(value)
    rngs = [torch.Generator().manual_seed(number) for number in range(len(parameters))]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for _ in range(num_steps):
            for parameter, rng in zip(parameters, rngs, strict=True):
                noise = torch.randn(parameter.shape, generator=rng)
                parameter.grad = 100 * noise.to(parameter.dtype)
            try:
                type(twin).step(twin)
            except Exception:  # code of the user's; prepare's next trial reports the error
                return None, torch.empty(0)
    return twin, parameters[0].detach() - start


def _copied(value: Any) -> Any:
    """A copy of tensors and plain containers, so that a trial changes nothing of the user's."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, list | dict | set):
        return copy.copy(value)
    return value


def _is_equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, float) and isinstance(b, float) and a != a:
        return b != b
    try:
        return a is b or bool(a == b)
    except (RuntimeError, TypeError, ValueError):  # a tensor in a list, an array
        return False


def make_twin(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """An optimizer of the same class and attributes, over other parameters, without state."""
    if isinstance(optimizer, JointOptimizer):
        return _joint_twin(optimizer, groups)
    twin: Optimizer = object.__new__(type(optimizer))
    for name, value in optimizer.__dict__.items():
        if name not in {*REPLACED, "state", "param_groups"}:
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
    """A twin of each part, over its groups, with a common state."""
    parts, rest, state = [], list(groups), defaultdict[Any, Any](dict)
    for part in optimizer.parts:
        count = len(part.param_groups)
        parts.append(make_twin(part, rest[:count]))
        parts[-1].state, rest = state, rest[count:]
    return JointOptimizer(parts, state)


def is_twin(optimizer: Optimizer) -> bool:
    """Whether this optimizer is a twin."""
    return _TWIN in optimizer.__dict__


@dataclass(frozen=True, slots=True)
class TwinPart:
    """The twin of one of several optimizers, or of the only one.

    Attributes:
        bare: its ``step``, without torch's wrappers where possible.
        numbers: of all parameters that its optimizer steps; the twin may have a share of them.
        fused: its groups that use torch's one-pass SGD kernel.
    """

    twin: Optimizer
    bare: Callable[[Optimizer], object]
    numbers: Sequence[int]
    fused: Sequence[dict[str, Any]]

    def choose_kernels(self) -> None:
        """Use torch's one-pass SGD kernel where it can make the next step."""
        for group in self.fused:
            stepped = [parameter for parameter in group["params"] if parameter.grad is not None]
            group["fused"] = not _has_mixed_momentum(self.twin, stepped)

    def step(self, factor: float) -> None:
        """Step on ``factor`` times the gradients, whose memory stays unchanged."""
        for parameter in parameters_of(self.twin) if factor != 1.0 else ():
            if parameter.grad is not None:
                parameter.grad = parameter.grad * factor
        with torch.no_grad():
            self.bare(self.twin)


def _has_mixed_momentum(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> bool:
    """Whether some of these parameters have momentum, and others have none yet.

    A parameter that gets gradients later than others, as when a layer thaws, has none; torch's
    one-pass SGD needs momentum for all or for none (torch 2.13).
    """
    state = optimizer.state
    has_momentum = {
        state.get(parameter, {}).get("momentum_buffer") is not None for parameter in parameters
    }
    return len(has_momentum) > 1


def too_mixed_to_fuse(optimizer: Optimizer, *, has_closure: bool) -> list[int]:
    """Numbers of groups of torch's SGD whose one-pass kernel cannot make the next step.

    Args:
        has_closure: whether the step itself computes the gradients.
    """
    if type(optimizer) is not torch.optim.SGD:
        return []
    return [
        number
        for number, group in enumerate(optimizer.param_groups)
        if group.get("fused")
        and _has_mixed_momentum(
            optimizer,
            (
                parameter
                for parameter in group["params"]
                if has_closure or parameter.grad is not None
            ),
        )
    ]


def twin_parts(
    optimizer: Optimizer, twin: Optimizer, number_of: Mapping[nn.Parameter, int]
) -> list[TwinPart]:
    """The parts of a twin, each with the numbers of its parameters."""
    return [
        TwinPart(
            twin=part,
            bare=bare_step(own),
            numbers=[number_of[parameter] for parameter in parameters_of(own)],
            fused=[
                group
                for group in part.param_groups
                if type(own) is torch.optim.SGD and group.get("fused")
            ],
        )
        for own, part in zip(parts_of(optimizer), parts_of(twin), strict=True)
    ]


def bare_step(optimizer: Optimizer) -> Callable[[Optimizer], object]:
    """The class's ``step``; torch's own without its wrappers, which cost more than a small update.

    The wrappers call hooks, of which there must be none, and record profiler events.
    """
    step: Any = type(optimizer).step
    if keeps_gradients(optimizer):
        while hasattr(step, "__wrapped__"):
            step = step.__wrapped__
    bare: Callable[[Optimizer], object] = step
    return bare


def _may_fuse(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether torch's one-pass kernel can step this group: the same rule, a third of the time."""
    is_free = group.get("fused") is None and group.get("foreach") is None
    return (
        type(optimizer) in FUSED
        and is_free
        and not group.get("differentiable")
        and not isinstance(group.get("lr"), Tensor)
        and all(parameter.is_floating_point() for parameter in group["params"])
    )
