"""A second prepared loader: each mini-batch comes with the same share of the matching batch."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.context import Context
from paceline.errors import ConfigError
from paceline.exchange.solo import SoloExchange
from paceline.replica.seeding import mix
from paceline.script.second_loader import SecondLoader
from paceline.script.worker import BESIDE_SALT, Pace
from reference import differ
from runs import Run, assert_each_sample_once, run_script

CLOSE = 1e-9
SEED = 5
HEAD = """
import itertools, sys, time
from pathlib import Path
import torch, paceline
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

class Own:
    def __init__(self, generator):
        self.generator = generator
    def __iter__(self):
        order = list(range(24))
        self.generator.shuffle(order)
        return iter(order)
    def __len__(self):
        return 24

class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(24.0).double())

def data(number, seed):
    inputs = torch.randn(number, 3, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs.double(), torch.arange(number))

def note(name, **values):
    with open(f"{{name}}-{{pace.worker}}.txt", "a") as file:
        print(*(" ".join(map(str, map(int, one))) for one in values.values()), sep="|", file=file)

pace = paceline.connect()
torch.manual_seed(1)
model = nn.Linear(3, 1).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loader = DataLoader(data({num}, 2), batch_size={size}, shuffle={shuffle})
model, optimizer, loader = pace.prepare(model, optimizer, loader, batch={batch!r})
loader_b = pace.prepare(DataLoader(data({num_b}, 3), batch_size={size_b}, {options}))

def train(x, numbers, u, others):
    with pace.step():
        optimizer.zero_grad()
        (model(x).square().mean() + 2 * (model(u) - 1).square().mean()).backward()
        note("used", a=numbers, b=others)
        optimizer.step()

def again(loader):
    while True:
        yield from loader

"""
TAIL = """
if pace.is_main:
    torch.save({name: one.clone() for name, one in model.state_dict().items()}, "found.pt")
"""
ZIP = """
for epoch in pace.epochs(3):
    for (x, a), (u, b) in zip(loader, loader_b):
        train(x, a, u, b)
"""
BY_HAND = """
it = iter(loader_b)
for epoch in pace.epochs(3):
    for x, a in loader:
        try:
            u, b = next(it)
        except StopIteration:
            it = iter(loader_b)
            u, b = next(it)
        train(x, a, u, b)
"""
EACH_EPOCH = """
for epoch in pace.epochs(3):
    others = again(loader_b)
    for x, a in loader:
        train(x, a, *next(others))
"""
BY_COUNT = """
for epoch in pace.epochs(3):
    for number, (x, a) in enumerate(loader):
        if number % len(loader_b) == 0:
            it = iter(loader_b)
        train(x, a, *next(it))
"""
UPDATES = """
others = again(loader_b)
for x, a in pace.updates(18, loader):
    train(x, a, *next(others))
"""
USUAL: dict[str, Any] = {
    "num": 48, "size": 8, "num_b": 32, "size_b": 8, "shuffle": False, "batch": "global",
    "options": "shuffle=False",
}  # fmt: skip


def run(folder: Path, patch: pytest.MonkeyPatch, loop: str, **options: Any) -> Run:
    patch.chdir(folder)
    words = {name: options.pop(name, value) for name, value in USUAL.items()}
    script = folder / "train.py"
    script.write_text(HEAD.format(**words) + loop + TAIL)
    settings = {"workers": 2, "engine": "inline", "seed": SEED, **options}
    return run_script(script, folder, **settings)


def used(folder: Path) -> list[tuple[list[int], list[int]]]:
    """The mini-batches of all workers, each with its second batch."""
    lines = [line for path in folder.glob("used-*.txt") for line in path.read_text().splitlines()]
    pairs = [line.split("|") for line in lines]
    return [
        ([int(word) for word in a.split()], [int(word) for word in b.split()]) for a, b in pairs
    ]


def data(number: int, seed: int) -> TensorDataset:
    inputs = torch.randn(number, 3, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs.double(), torch.arange(number))


# -- plain twins -----------------------------------------------------------------------------------


def drawn(seed: int, number: int, num: int, size: int, *, shuffle: bool) -> list[list[int]]:
    """The batches of a pass, as several workers draw them."""
    loader = DataLoader(data(num, 0), batch_size=size, shuffle=shuffle)
    order = paceline.epoch_order(loader, seed, number)
    return [order[first : first + size] for first in range(0, num, size)]


def endless(each: Iterator[list[list[int]]]) -> Iterator[list[int]]:
    for batches in each:
        yield from batches


def twin(how: str, *, shuffle: bool, size: int = 8, num_b: int = 32) -> dict[str, Tensor]:
    """One process, the same loop, the same orders."""
    torch.manual_seed(1)
    model = nn.Linear(3, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    a, b = data(48, 2).tensors[0], data(num_b, 3).tensors[0]
    seed_b = mix(SEED, 1, BESIDE_SALT)
    rounds = -(-(48 // size) // (num_b // size))

    def passes(first: int) -> Iterator[list[list[int]]]:
        for number in range(first, 1000):
            yield drawn(seed_b, number, num_b, size, shuffle=shuffle)

    others = endless(passes(0))
    for epoch in range(3):
        mine: Any = drawn(SEED, epoch, 48, size, shuffle=shuffle)
        if how != "once":
            others = endless(passes(epoch * rounds))
        if how == "zip":
            mine = mine[: num_b // size]
        for batch in mine:
            optimizer.zero_grad()
            beside = (model(b[next(others)]) - 1).square().mean()
            (model(a[batch]).square().mean() + 2 * beside).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


LOOPS = {
    "zip": (ZIP, "zip"),
    "by hand": (BY_HAND, "once"),
    "for each epoch": (EACH_EPOCH, "each"),
    "by count": (BY_COUNT, "each"),
    "by updates": (UPDATES, "once"),
}


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("name", LOOPS)
def test_full_sync_matches_plain_pytorch(
    name: str, workers: int, shuffle: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, how = LOOPS[name]
    run(tmp_path, monkeypatch, loop, workers=workers, shuffle=shuffle, options=f"{shuffle=}")
    result = torch.load(tmp_path / "found.pt")
    assert differ(result, twin(how, shuffle=shuffle)) < CLOSE


@pytest.mark.parametrize("path", ["peers", "store"])
def test_workers_in_processes_match_plain_pytorch(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loader worker fetches for each of the two."""
    options = "shuffle=True, num_workers=1"
    run(tmp_path, monkeypatch, BY_HAND, engine="local", path=path, shuffle="True, num_workers=1",
        options=options)  # fmt: skip
    assert differ(torch.load(tmp_path / "found.pt"), twin("once", shuffle=True)) < CLOSE


def test_a_lone_worker_gets_the_users_own_loader() -> None:
    pace = Pace(SoloExchange(), Context())
    model = nn.Linear(3, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader, plain = (DataLoader(data(24, 2), batch_size=8, shuffle=True) for _ in range(2))
    *_, loader = pace.prepare(model, optimizer, loader)
    other = pace.prepare(plain)
    assert isinstance(other, SecondLoader)
    assert len(other) == len(plain)
    torch.manual_seed(3)
    expected = [one for _, one in zip(range(9), _repeated(plain), strict=False)]
    torch.manual_seed(3)
    results = [one for _, one in zip(range(9), _repeated(other), strict=False)]
    assert all(torch.equal(one[0], two[0]) for one, two in zip(expected, results, strict=True))


def _repeated(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


# -- under every protocol --------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["k-sync:1", "k-batch-async:2", "async", "local-sgd:2"])
@pytest.mark.parametrize("loop", [BY_HAND, EACH_EPOCH, UPDATES])
def test_the_second_batch_follows_from_the_first_ones_position(
    loop: str, protocol: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where passes of both end together, the k-th batch of B is beside the k-th of A, modulo."""
    result = run(tmp_path, monkeypatch, loop, protocol=protocol, num_b=16, workers=3)
    if loop != UPDATES:
        assert_each_sample_once(result, 48, 3)
    pairs = used(tmp_path)
    assert {len(mine) == len(other) for mine, other in pairs} == {True}
    assert all([index % 16 for index in mine] == other for mine, other in pairs)


def test_a_death_does_not_change_the_pairs_of_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = ("kill worker 1 at update 4",)
    result = run(tmp_path, monkeypatch, BY_HAND, engine="local", fault=fault, num_b=16)
    assert result.left
    assert_each_sample_once(result, 48, 3)
    assert all([index % 16 for index in mine] == other for mine, other in used(tmp_path))


@pytest.mark.parametrize("name", ["by hand", "by updates", "for each epoch"])
@pytest.mark.parametrize("updates", [2, 8, 12])
def test_a_resumed_run_ends_as_one_that_never_stopped(
    name: str, updates: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes of 4 batches beside epochs of 6: it stops in the middle of both, or between them."""
    loop, how = LOOPS[name]
    settings = {"engine": "local", "shuffle": True, "options": "shuffle=True"}
    begun = run(tmp_path, monkeypatch, loop, updates=updates, **settings)
    assert begun.summary.updates == updates
    again = run(tmp_path, monkeypatch, loop, resume=str(tmp_path / "run"), **settings)
    assert again.summary.updates == 18
    assert differ(torch.load(tmp_path / "found.pt"), twin(how, shuffle=True)) < CLOSE


def test_an_iterator_that_may_be_an_older_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, monkeypatch, EACH_EPOCH, updates=6)
    with pytest.raises(ConfigError, match="was resumed after its first epoch"):
        run(tmp_path, monkeypatch, EACH_EPOCH, resume=str(tmp_path / "run"))


def test_parts_of_a_short_batch_are_shared_like_the_first_loaders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A last batch of 4 beside one of 8, and of 8 beside one of 4."""
    run(tmp_path, monkeypatch, EACH_EPOCH, num=44, num_b=20)
    pairs = {(tuple(mine), tuple(other)) for mine, other in used(tmp_path)}
    for number in range(6):
        rows = [other for mine, other in pairs if mine[0] // 8 == number]
        start, size = number % 3 * 8, 8 if number % 3 < 2 else 4
        assert sorted(index for row in rows for index in row) == list(range(start, start + size))


def test_a_per_worker_batch_size_is_that_of_a_mini_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, monkeypatch, ZIP, batch="per-worker", size=4, size_b=4)
    result = torch.load(tmp_path / "found.pt")
    assert differ(result, twin("zip", shuffle=False)) < CLOSE


def test_without_gradients_the_whole_second_loader_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = (
        ZIP
        + """
    with torch.no_grad():
        note("seen", b=[number for _, numbers in loader_b for number in numbers])
    found = pace.evaluate(lambda batch: {"sum": (batch[1].sum().item(), len(batch[1]))}, loader_b)
    assert found["sum"] == (sum(range(32)), 32)
"""
    )
    run(tmp_path, monkeypatch, loop)
    for worker in (0, 1):
        lines = (tmp_path / f"seen-{worker}.txt").read_text().splitlines()
        assert lines == [" ".join(map(str, range(32)))] * 3


def test_several_loaders_draw_independent_orders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = """
loader_c, loader_d = pace.prepare(*(DataLoader(data(32, 3), 8, shuffle=True) for _ in range(2)))
for epoch in pace.epochs(1):
    for (x, a), (u, b), (v, c), (w, d) in zip(loader, loader_b, loader_c, loader_d):
        note("three", b=b, c=c, d=d)
        train(x, a, u, b)
"""
    run(tmp_path, monkeypatch, loop, options="shuffle=True")
    texts = [path.read_text() for path in sorted(tmp_path.glob("three-*"))]
    rows = [list(map(str.split, line.split("|"))) for text in texts for line in text.splitlines()]
    orders = [[number for row in rows for number in row[column]] for column in range(3)]
    assert all(sorted(map(int, order)) == list(range(32)) for order in orders)
    assert orders[0] != orders[1] != orders[2] != orders[0]


# -- what is refused -------------------------------------------------------------------------------

_LOOP = "\nfor epoch in pace.epochs(2):\n    for x, a in loader:\n"
REFUSED = {
    "cycle": (
        "\nfor epoch in pace.epochs(2):\n"
        "    for (x, a), (u, b) in zip(loader, itertools.cycle(loader_b)):\n"
        "        train(x, a, u, b)\n",
        "itertools.cycle keeps the batches",
    ),
    "twice": (
        f"it = iter(loader_b){_LOOP}        train(x, a, *next(it))\n        next(it)\n",
        "called twice for one mini-batch",
    ),
    "every second": (
        f"it = iter(loader_b){_LOOP}        if a[0] // 8 % 2 == 0: u = next(it)\n"
        "        train(x, a, *u)\n",
        "and one was left out",
    ),
    "anew": (f"{_LOOP}        train(x, a, *next(iter(loader_b)))\n", "the end of the last one"),
    "before the loop": ("u = next(iter(loader_b))\n", "inside the prepared loader's loop"),
    "first in a zip": (
        "\nfor epoch in pace.epochs(2):\n    for u, x in zip(loader_b, loader): pass\n",
        "inside the prepared loader's loop",
    ),
    "two at once": (
        f"it, other = iter(loader_b), iter(loader_b){_LOOP}        next(it)\n",
        "two iterators over the second loader are used at once",
    ),
    "after a break": (
        f"others = again(loader_b){_LOOP}        train(x, a, *next(others))\n"
        "        if int(a[0]) >= 16: break\n",
        "was left early",
    ),
    "no loader": ("pace.prepare(nn.Linear(2, 2))\n", r"called twice, now with a Linear"),
    "stream": ("pace.prepare(DataLoader(Stream(), 8))\n", "second loader is over a stream"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_second_loaders_are_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, says = REFUSED[name]
    with pytest.raises(ConfigError, match=says):
        run(tmp_path, monkeypatch, loop)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"size_b": 5}, "a batch of 5 of the second loader cannot be shared out like one of 8"),
        ({"num": 43}, "a batch of 8 of the second loader cannot be shared out like one of 3"),
        ({"num_b": 25}, "a batch of 1 of the second loader cannot be shared out like one of 8"),
        ({"size_b": 1, "protocol": "local-sgd:2"}, "a batch of 1 of the second loader"),
        ({"options": "sampler=Own(__import__('random').Random(3))"}, "random numbers of its own"),
        ({"options": "sampler=Own(__import__('random').Random())"}, "random numbers of its own"),
        ({"options": "in_order=False"}, "in_order=False"),
    ],
    ids=str,
)  # fmt: skip
def test_a_loader_that_cannot_be_shared_is_refused_before_a_step(
    options: dict[str, Any], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=says):
        run(tmp_path, monkeypatch, BY_HAND, **options)
    assert not list(tmp_path.glob("used-*"))


def test_orders_that_differ_between_workers_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = "sampler=torch.randperm(32, generator=torch.Generator().manual_seed(pace.worker))"
    with pytest.raises(ConfigError, match="workers 0 and 1 drew different orders for epoch 1"):
        run(tmp_path, monkeypatch, ZIP, options=options)
    assert not list(tmp_path.glob("used-*"))


def test_the_first_prepare_needs_a_model() -> None:
    pace = Pace(SoloExchange(), Context())
    with pytest.raises(ConfigError, match="was first given only a loader"):
        pace.prepare(DataLoader(data(8, 2), batch_size=4))


def test_a_second_loader_beside_a_stream_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "\nstream = DataLoader(Stream(), batch_size=8)\n"
    words = HEAD.format(**USUAL)
    words = words.replace("loader = DataLoader(data(48, 2), batch_size=8, shuffle=False)", script)
    words = words.replace("optimizer, loader, batch", "optimizer, stream, batch")
    path = tmp_path / "train.py"
    path.write_text(words + ZIP)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="the prepared loader is over a stream"):
        run_script(path, tmp_path, workers=2, engine="inline")


def test_accumulation_is_refused_with_a_second_loader_or_sticky() -> None:
    pace, model = Pace(SoloExchange(), Context()), nn.Linear(3, 1)
    optimizer, loader = torch.optim.SGD(model.parameters()), DataLoader(data(8, 2), batch_size=4)
    with pytest.raises(ConfigError, match=r"accumulate 2 with prepare\(sticky=True\)"):
        pace.prepare(model, optimizer, loader, accumulate=2, sticky=True)
    pace.prepare(model, optimizer, loader, accumulate=2)
    with pytest.raises(ConfigError, match="accumulate 2 with a second prepared loader"):
        pace.prepare(DataLoader(data(8, 2), batch_size=4))
