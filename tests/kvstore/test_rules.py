"""The effect of a push: sum, assign, a function, an optimizer; also across processes."""

import functools
import multiprocessing
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline import ConfigError, KVStore
from paceline.kvstore.updaters import UpdateFunction
from pushers import step_adam

LARGE = 2**18


def average(key: str, pushed: Tensor, stored: Tensor) -> None:
    stored.mul_(0.5).add_(pushed, alpha=0.5)


def test_assign_keeps_the_newest_value() -> None:
    with KVStore(updater="assign", capacity_bytes=2**20) as store:
        store.init("w", torch.zeros(3))
        store.push("w", torch.ones(3))
        store.push("w", torch.full((3,), 4.0))
        assert torch.equal(store.pull("w"), torch.full((3,), 4.0))


@pytest.mark.parametrize("is_set_late", [False, True])
@pytest.mark.parametrize("numel", [4, LARGE])
def test_updater_function_gets_whole_values_and_changes_them_in_place(
    numel: int, is_set_late: bool
) -> None:
    seen = []

    def halve(key: str, pushed: Tensor, stored: Tensor) -> None:
        seen.append((key, tuple(pushed.shape), tuple(stored.shape)))
        average(key, pushed, stored)

    with KVStore(updater="sum" if is_set_late else halve, capacity_bytes=2**26) as store:
        store.init("w", torch.zeros(2, numel // 2, dtype=torch.float64))
        store.set_updater(halve)
        store.push("w", torch.ones(2, numel // 2, dtype=torch.float64))
        store.push("w", torch.ones(2, numel // 2, dtype=torch.float64))
        assert seen == [("w", (2, numel // 2), (2, numel // 2))] * 2
        assert (store.pull("w") == 0.75).all()
        assert store.version("w") == 2


@pytest.mark.parametrize("numel", [4, LARGE])
def test_updater_function_that_raises_changes_nothing(store: KVStore, numel: int) -> None:
    def fail(key: str, pushed: Tensor, stored: Tensor) -> None:
        stored.fill_(-1)
        raise ValueError("no")

    store.init("w", torch.zeros(numel, dtype=torch.float64))
    store.set_updater(fail)
    with pytest.raises(ValueError, match="no"):
        store.push("w", torch.ones(numel, dtype=torch.float64))
    assert (store.pull("w") == 0).all()
    store.set_updater("sum")
    assert store.push("w", torch.ones(numel, dtype=torch.float64)) == 1
    assert (store.pull("w") == 1).all()


def test_updater_that_raises_names_the_keys_that_were_pushed(store: KVStore) -> None:
    def fail_at_c(key: str, pushed: Tensor, stored: Tensor) -> None:
        stored.add_(pushed)
        if key == "c":
            raise ValueError("no")

    names = ("a", "b", "c", "d")
    store.init({name: torch.zeros(3) for name in names})
    store.set_updater(fail_at_c)
    with pytest.raises(ValueError, match="no") as caught:
        store.push({name: torch.ones(3) for name in names})
    assert caught.value.__notes__ == [
        "these keys were pushed before it, the others were not: 'a', 'b'"
    ]
    assert [store.version(name) for name in names] == [1, 1, 0, 0]
    with pytest.raises(ValueError, match="no") as alone:
        store.push("c", torch.ones(3))
    assert not hasattr(alone.value, "__notes__")


def test_updater_function_must_not_use_the_calling_store(store: KVStore) -> None:
    store.init({"v": torch.zeros(2), "w": torch.zeros(2)})
    store.set_updater(lambda key, pushed, stored: store.push("v", pushed))
    with pytest.raises(ConfigError, match="must not use the store that calls it"):
        store.push("w", torch.ones(2))
    store.set_updater("sum")
    store.push("v", torch.ones(2))


OPTIMIZERS: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    (torch.optim.AdamW, {"lr": 0.01}),
    (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.5}),
    (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
    (torch.optim.Adafactor, {"lr": 0.01}),
]


@pytest.mark.parametrize("is_set_late", [False, True])
@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS)
def test_pushes_step_as_the_optimizer_alone(
    kind: Callable[..., Optimizer], options: dict[str, Any], is_set_late: bool
) -> None:
    generator = torch.Generator().manual_seed(1)
    values = {"w": torch.randn(LARGE // 512, 1024, generator=generator), "b": torch.randn(5)}
    parameters = {key: torch.nn.Parameter(value.clone()) for key, value in values.items()}
    alone = kind(parameters.values(), **options)
    with KVStore(capacity_bytes=2**26) as store:
        if is_set_late:
            store.init(values)
        store.set_optimizer(kind, **options)
        if not is_set_late:
            store.init(values)
        for _ in range(4):
            for parameter in parameters.values():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            store.push({key: one.grad for key, one in parameters.items()})  # type: ignore[misc]
            alone.step()
        for key, parameter in parameters.items():
            assert torch.equal(store.pull(key), parameter.detach())


class Own(Optimizer):
    """A custom optimizer: ``also`` is applied to each parameter and its state."""

    def __init__(self, parameters: Any, also: Callable[[Any, Any, Any], None]) -> None:
        self.also = also
        super().__init__(parameters, {"lr": 0.5})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.also(group, parameter, self.state[parameter])


def _assigned(group: Any, one: Any, state: Any) -> None:
    one.data = one.data - group["lr"] * one.grad


def _counted(group: Any, one: Any, state: Any) -> None:
    group["t"] = group.get("t", 0) + 1


def _late(group: Any, one: Any, state: Any) -> None:
    state["slow" if state else "t"] = 1


def test_custom_optimizer_may_assign_but_keep_no_other_state(store: KVStore) -> None:
    store.set_optimizer(Own, also=_assigned)
    store.init("w", torch.zeros(2))
    store.push("w", torch.ones(2))
    store.push("w", torch.ones(2))
    assert torch.equal(store.pull("w"), torch.full((2,), -1.0))
    for also, memory in ((_counted, r"group\['t'\]"), (_late, r"self.state\[p\]\['slow'\]")):
        with pytest.raises(ConfigError, match=rf"keeps {memory} from push to push"):
            store.set_optimizer(Own, also=also)


def test_muon_accepts_matrices_and_refuses_other_shapes(store: KVStore) -> None:
    store.set_optimizer(torch.optim.Muon, lr=0.02)
    store.init("w", torch.ones(2, 2))
    store.push("w", torch.eye(2))
    assert not torch.equal(store.pull("w"), torch.ones(2, 2))
    with pytest.raises(ConfigError, match=r"for a key of shape \(3,\) \(ValueError: Muon only"):
        store.init("b", torch.ones(3))
    with pytest.raises(ConfigError, match=r"Invalid learning rate: -1"):
        store.set_optimizer(torch.optim.SGD, lr=-1)


def test_optimizer_set_again_starts_with_fresh_state(store: KVStore) -> None:
    """Its old state belongs to versions before those of the other updater."""
    store.init("w", torch.zeros(2))
    store.set_optimizer(torch.optim.SGD, lr=0.1, momentum=0.5)
    for _ in range(2):
        store.push("w", torch.ones(2))
    store.set_updater("sum")
    for _ in range(3):
        store.push("w", torch.ones(2))
    store.set_optimizer(torch.optim.SGD, lr=0.1, momentum=0.5)
    before = store.pull("w")
    store.push("w", torch.ones(2))
    assert torch.allclose(store.pull("w"), before - 0.1)


def test_optimizer_state_is_shared_between_processes() -> None:
    gradients = [[0.5, -1.0], [0.25, 2.0], [1.0, 1.0]]
    parameter = torch.nn.Parameter(torch.zeros(LARGE * 2))
    alone = torch.optim.Adam([parameter], lr=0.1)
    context = multiprocessing.get_context("forkserver")
    with KVStore(capacity_bytes=2**27) as store:
        store.set_optimizer(torch.optim.Adam, lr=0.1)
        store.init("w", torch.zeros(LARGE * 2))
        step_adam(store, gradients[:1])
        process = context.Process(target=step_adam, args=(store, gradients[1:2]))
        process.start()
        process.join()
        step_adam(store, gradients[2:])
        for gradient in gradients:
            parameter.grad = torch.tensor(gradient).repeat(LARGE)
            alone.step()
        assert process.exitcode == 0
        assert torch.equal(store.pull("w"), parameter.detach())


def test_processes_with_different_updaters_get_an_error(store: KVStore) -> None:
    store.init("w", torch.zeros(3))
    other = KVStore.attach(store.fd)
    other.push("w", torch.ones(3))
    store.set_optimizer(torch.optim.SGD, lr=0.1)
    with pytest.raises(ConfigError, match=r"'SGD\(lr=0.1\)', but this process has 'sum'"):
        other.push("w", torch.ones(3))
    other.set_optimizer(torch.optim.SGD, lr=0.1)
    assert other.push("w", torch.ones(3)) == 2
    assert torch.equal(store.pull("w"), torch.full((3,), 0.9))
    other.close()


def scaled(factor: float) -> UpdateFunction:
    def scale(key: str, pushed: Tensor, stored: Tensor) -> None:
        stored.add_(pushed, alpha=factor)

    return scale


def add(key: str, pushed: Tensor, stored: Tensor, *, factor: float = 1.0) -> None:
    stored.add_(pushed, alpha=factor)


def applied(what: object, key: str, pushed: Tensor, stored: Tensor) -> None:
    stored.add_(pushed)


def recursive(factor: float) -> UpdateFunction:
    def halve(key: str, pushed: Tensor, stored: Tensor) -> None:
        stored.mul_(factor)
        if stored.abs().max() > 1:
            halve(key, pushed, stored)

    return halve


PAIRS: dict[str, Callable[[float], UpdateFunction]] = {
    "closures": scaled,
    "recursive closures": recursive,
    "partials": lambda factor: functools.partial(add, factor=factor),
    "classes in partials": lambda factor: functools.partial(
        applied, torch.optim.Adam if factor > 1 else torch.optim.AdamW
    ),
    "builtins in partials": lambda factor: functools.partial(
        applied, torch.add if factor > 1 else torch.sub
    ),
    "lambdas": lambda factor: (
        (lambda key, pushed, stored: stored.add_(pushed))
        if factor > 1
        else (lambda key, pushed, stored: stored.sub_(pushed))
    ),
}


@pytest.mark.parametrize("kind", PAIRS)
def test_functions_of_one_name_are_the_same_updater_only_if_they_do_the_same(
    store: KVStore, kind: str
) -> None:
    store.set_updater(PAIRS[kind](2.0))
    store.init("w", torch.zeros(3))
    with KVStore.attach(store.fd, updater=PAIRS[kind](2.0)) as same:
        assert same.push("w", torch.ones(3)) == 1
    refused = pytest.raises(ConfigError, match=r"the store's updater is .* but this process has")
    with KVStore.attach(store.fd, updater=PAIRS[kind](0.5)) as other, refused:
        other.push("w", torch.ones(3))


def test_an_updater_may_use_a_variable_that_is_set_later(store: KVStore) -> None:
    def update(key: str, pushed: Tensor, stored: Tensor) -> None:
        stored.add_(pushed, alpha=rate)

    store.set_updater(update)
    rate = 0.5
    store.init("w", torch.zeros(3))
    store.push("w", torch.ones(3))
    assert store.pull("w").tolist() == [rate] * 3


def test_function_that_makes_an_optimizer_is_compared_by_what_it_does(store: KVStore) -> None:
    def sgd(lr: float) -> Callable[..., Optimizer]:
        return lambda parameters: torch.optim.SGD(parameters, lr=lr)

    store.set_optimizer(sgd(0.1))
    store.init("w", torch.zeros(3))
    other = KVStore.attach(store.fd)
    other.set_optimizer(sgd(0.1))
    assert other.push("w", torch.ones(3)) == 1
    other.set_optimizer(sgd(0.2))
    with pytest.raises(ConfigError, match="but this process has"):
        store.push("w", torch.ones(3))
    other.close()


def test_optimizer_instance_is_refused(store: KVStore) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    with pytest.raises(ConfigError, match=r"set_optimizer\(torch.optim.SGD, lr=...\)"):
        store.set_optimizer(optimizer)  # type: ignore[arg-type]


def test_optimizer_refuses_integers(store: KVStore) -> None:
    store.init("counts", torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ConfigError, match=r"floating-point tensors, not torch.int64"):
        store.set_optimizer(torch.optim.SGD, lr=0.1)
    assert store.push("counts", torch.ones(3, dtype=torch.int64)) == 1
