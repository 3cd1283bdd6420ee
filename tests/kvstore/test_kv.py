"""The guarantees of a key-value store within one process."""

import gc
import os
import threading

import pytest
import torch
from torch import Tensor

from paceline import ConfigError, KVStore, LinkError

LARGE = 2**18
"""Elements of a large float64 value."""


def test_pull_returns_the_initial_value(store: KVStore) -> None:
    value = torch.randn(3, 5)
    store.init("w", value)
    assert torch.equal(store.pull("w"), value)
    assert store.version("w") == 0


@pytest.mark.parametrize("numel", [0, 1, 3, LARGE, LARGE + 1])
def test_pushes_are_summed_and_counted(store: KVStore, numel: int) -> None:
    store.init("w", torch.full((numel,), 5, dtype=torch.float64))
    for number in range(1, 6):
        assert store.push("w", torch.arange(numel, dtype=torch.float64)) == number
    assert torch.equal(store.pull("w"), 5 + 5 * torch.arange(numel, dtype=torch.float64))
    assert store.version("w") == 5


@pytest.mark.parametrize(
    "dtype",
    [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.complex64],
)
def test_every_dtype_is_kept(store: KVStore, dtype: torch.dtype) -> None:
    store.init("w", torch.ones(3, 2, dtype=dtype))
    store.push("w", torch.ones(3, 2, dtype=dtype))
    assert torch.equal(store.pull("w"), torch.full((3, 2), 2, dtype=dtype))


def test_scalars_and_strided_values_work(store: KVStore) -> None:
    matrix = torch.arange(12.0).view(3, 4)
    store.init({"loss": torch.tensor(2.0), "m": matrix.T})
    store.push({"loss": torch.tensor(3.0), "m": matrix.T})
    out = torch.zeros(3, 4).T
    store.pull({"m": out})
    assert store.pull("loss").item() == 5.0
    assert torch.equal(out, 2 * matrix.T)


def test_pull_fills_out_even_if_it_requires_grad(store: KVStore) -> None:
    store.init("w", torch.ones(3))
    parameter = torch.nn.Parameter(torch.zeros(3))
    assert store.pull("w", out=parameter) is parameter
    assert torch.equal(parameter.detach(), torch.ones(3))


def test_list_is_pushed_as_its_sum_in_one_push(store: KVStore) -> None:
    store.init("w", torch.zeros(3))
    values = [torch.ones(3), torch.full((3,), 2.0), torch.full((3,), 3.0)]
    assert store.push("w", values) == 1
    assert torch.equal(store.pull("w"), torch.full((3,), 6.0))
    assert torch.equal(values[0], torch.ones(3))


def test_pull_fills_several_out_tensors(store: KVStore) -> None:
    store.init("w", torch.ones(3))
    outs = [torch.zeros(3), torch.zeros(3)]
    store.pull("w", out=outs)
    assert all(torch.equal(out, torch.ones(3)) for out in outs)


def test_several_keys_are_pushed_and_pulled_at_once(store: KVStore) -> None:
    store.init({"a": torch.zeros(2), "b": torch.zeros(3)})
    assert store.push({"a": torch.ones(2), "b": [torch.ones(3)] * 2}) == {"a": 1, "b": 1}
    pulled = store.pull(["b", "a"])
    assert list(pulled) == ["b", "a"]
    assert torch.equal(pulled["b"], torch.full((3,), 2.0))
    assert store.keys() == ["a", "b"]
    assert "a" in store
    assert "c" not in store
    assert len(store) == 2


def test_pulled_tensor_is_a_copy(store: KVStore) -> None:
    store.init("w", torch.zeros(3))
    store.pull("w").fill_(9)
    assert torch.equal(store.pull("w"), torch.zeros(3))


def test_shards_are_balanced(store: KVStore) -> None:
    generator = torch.Generator().manual_seed(0)
    for number, numel in enumerate(torch.randint(1, 9000, (60,), generator=generator).tolist()):
        store.init(f"small.{number}", torch.zeros(numel))
    for number in range(store.num_shards):
        store.init(f"large.{number}", torch.zeros(LARGE, 2))
    loads, keys = store.shard_bytes(), store.keys()
    assert sum(loads) == sum(store.pull(key).nbytes for key in keys)
    assert max(loads) - min(loads) <= 9000 * 4


def test_many_pushes_use_at_most_twice_the_memory_of_the_values(store: KVStore) -> None:
    before = store.used_bytes()
    store.init("w", torch.zeros(LARGE, 4))
    values = [torch.ones(LARGE, 4)] * 100
    threads = [
        threading.Thread(target=lambda part=values[i::4]: [store.push("w", one) for one in part])
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(store.pull("w"), torch.full((LARGE, 4), 100.0))
    assert store.used_bytes() - before <= 2 * values[0].nbytes + 2**14


def test_memory_is_allocated_only_when_used() -> None:
    with KVStore(capacity_bytes=2**33) as store:
        assert store.used_bytes() < 2**16


# -- errors ------------------------------------------------------------------------------------


def test_unknown_key_gets_a_suggestion(store: KVStore) -> None:
    store.init({"layer.weight": torch.zeros(1), "layer.bias": torch.zeros(1)})
    with pytest.raises(ConfigError, match=r"'layer.wieght'.*did you mean 'layer.weight'"):
        store.push("layer.wieght", torch.zeros(1))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(4), r"shape \(3,\), got \(4,\); nothing is broadcast"),
        (torch.zeros(1), r"shape \(3,\), got \(1,\)"),
        (torch.zeros(3, dtype=torch.float64), r"torch.float32, got torch.float64; value.to\("),
        (torch.zeros(3).to_sparse(), "dense"),
        (torch.zeros(3, device="meta"), "with memory"),
        (torch.zeros(3).numpy(), "must be a tensor or a list of at least one, got ndarray"),
        ([], "an empty list"),
        ([torch.zeros(3), torch.zeros(4)], "each value of key 'w'"),
        ([torch.zeros(3), 1.0], "must be a tensor, got float"),
    ],
)
def test_invalid_value_is_refused_and_changes_nothing(
    store: KVStore, value: Tensor, message: str
) -> None:
    store.init({"v": torch.zeros(3), "w": torch.zeros(3)})
    with pytest.raises(ConfigError, match=message):
        store.push({"v": torch.ones(3), "w": value})
    assert store.version("v") == store.version("w") == 0


def test_invalid_out_is_refused(store: KVStore) -> None:
    store.init("w", torch.zeros(3))
    with pytest.raises(ConfigError, match=r"out of key 'w' must have shape \(3,\)"):
        store.pull("w", out=torch.zeros(2))
    with pytest.raises(ConfigError, match="out is for one key"):
        store.pull(["w"], out=torch.zeros(3))


def test_duplicate_key_is_refused(store: KVStore) -> None:
    store.init("w", torch.zeros(3))
    with pytest.raises(ConfigError, match=r"'w' exists already \(torch.float32, shape \(3,\)\)"):
        store.init("w", torch.zeros(3))
    with pytest.raises(ConfigError, match="'w' is given twice"):
        store.pull(["w", "w"])


def test_invalid_calls_are_refused(store: KVStore) -> None:
    store.init("w", torch.zeros(3))
    with pytest.raises(ConfigError, match="has no value"):
        store.push("w", None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="already has the values"):
        store.push({"w": torch.zeros(3)}, torch.zeros(3))  # type: ignore[call-overload]
    with pytest.raises(ConfigError, match="a non-empty string, got ''"):
        store.init("", torch.zeros(3))
    with pytest.raises(ConfigError, match="a non-empty string, got 3"):
        store.init({3: torch.zeros(3)})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_shards": 0}, "num_shards must be >= 1, got 0"),
        ({"capacity_bytes": 0}, "capacity_bytes must be >= 1"),
        ({"patience_s": 0}, "patience_s must be > 0"),
        ({"updater": "som"}, "did you mean 'sum'"),
        ({"updater": 3}, "a function"),
        ({"updater": torch.optim.SGD}, r"store.set_optimizer\(torch.optim.SGD"),
    ],
)
def test_invalid_store_arguments_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KVStore(**arguments)  # type: ignore[arg-type]


def test_full_store_error_says_how_much_is_missing() -> None:
    with KVStore(capacity_bytes=2**16) as store:
        store.init("a", torch.zeros(1000))
        with pytest.raises(ConfigError, match=r"store is full: key 'b'.*capacity_bytes"):
            store.init("b", torch.zeros(10_000))
        assert store.keys() == ["a"]
        store.push("a", torch.ones(1000))


def test_store_larger_than_the_machine_is_refused() -> None:
    with pytest.raises(LinkError, match="are free on this machine"):
        KVStore(capacity_bytes=2**60)


def test_closed_store_says_so() -> None:
    store = KVStore(capacity_bytes=2**20)
    store.close()
    store.close()
    with pytest.raises(ConfigError, match="closed"):
        store.keys()
    assert repr(store) == "KVStore(closed)"


def test_invalid_descriptor_is_refused_and_not_leaked(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = tmp_path_factory.mktemp("kv") / "file"
    path.write_bytes(b"\0" * 8191)
    with path.open("r+b") as file:
        gc.collect()  # descriptors left by earlier tests could be closed during this one
        before = os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []
        for fd in (file.fileno(), 999_999):
            with pytest.raises(ConfigError, match=f"descriptor {fd} is no shared memory"):
                KVStore.attach(fd)
        gc.collect()  # descriptors held by the errors
        after = os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []
    assert len(after) == len(before)


def test_file_that_is_no_store_cannot_be_attached(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("kv") / "file"
    path.write_bytes(b"\0" * 8192)
    with path.open("r+b") as file, pytest.raises(ConfigError, match="is not a store"):
        KVStore.attach(file.fileno())
