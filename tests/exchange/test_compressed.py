"""Compressed gradients between real members over gloo, and their residual."""

import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import PIPE
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import forked
from compressing import example
from dying import Fault, with_fault
from paceline.compression import COMPRESSORS, parse
from paceline.context import Context
from paceline.errors import ConfigError
from paceline.exchange.base import ScriptHooks
from paceline.exchange.compressed import CompressedGradient, Span
from paceline.script.prepared import Prepared
from paceline.store.fragments import Fragment, Fragments
from paceline.store.layout import lay_out
from paceline.trace.records import Header, Resumed
from reference import differ
from runs import Run, assert_each_sample_once, run_script, train
from tiny import EPOCHS, NUM_SAMPLES, TASK

SCRIPT = """
import os, torch, paceline
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pace = paceline.connect()
torch.manual_seed(0)
generator = torch.Generator().manual_seed(1)
inputs = torch.randn(240, 12, generator=generator)
targets = inputs[:, :4].argmax(1)
model = nn.Linear(12, 4)
if os.environ.get("MODEL") != "softmax":
    model = nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = DataLoader(TensorDataset(inputs, targets), batch_size=24, shuffle=True)
model, optimizer, loader = pace.prepare(model, optimizer, loader)
for epoch in pace.epochs(10):
    for x, y in loader:
        with pace.step():
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
model.eval()
with torch.no_grad():
    loss = nn.functional.cross_entropy(model(inputs), targets)
from safetensors.torch import save_file
state = {name: one.clone() for name, one in model.state_dict().items()}
save_file({"loss": loss, **state}, f"own-{os.environ.get('RANK', 'alone')}.safetensors")
"""


def own_states(folder: Path, **settings: Any) -> list[dict[str, Tensor]]:
    """The script's final states, one a worker, with the loss."""
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(SCRIPT)
    run_script(folder / "train.py", folder, path="collective", **settings)
    paths = sorted(folder.glob("own-*.safetensors"))
    assert len(paths) == settings["workers"]
    return [load_file(path) for path in paths]


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, float]:
    """Losses of the script under plain PyTorch, by model."""
    result = {}
    for model in ("softmax", "mlp"):
        folder = tmp_path_factory.mktemp(model)
        (folder / "train.py").write_text(SCRIPT)
        env = {**os.environ, "MODEL": model, "PYTHONPATH": os.pathsep.join(sys.path)}
        forked.run(["train.py"], cwd=folder, env=env).check_returncode()
        result[model] = float(load_file(folder / "own-alone.safetensors")["loss"])
    return result


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", COMPRESSORS)
@pytest.mark.parametrize(("workers", "model"), [(2, "mlp"), (3, "softmax")])
def test_training_keeps_its_loss_and_gives_equal_weights(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    losses: Mapping[str, float],
    name: str,
    workers: int,
    model: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MODEL", model)
    compress = "topk:20%" if name == "topk" else example(name)
    first, *others = own_states(tmp_path, workers=workers, compress=compress)
    print(name, float(first["loss"]), losses[model])
    way = math.log(4) - losses[model]  # from guessing
    assert abs(float(first["loss"]) - losses[model]) < 0.05 * way
    for other in others:
        for key, value in first.items():
            assert torch.equal(other[key], value), key


@pytest.mark.timeout(120)
@pytest.mark.parametrize("compress", ["int8", "topk:10%"])
def test_differences_of_local_steps_are_compressed_too(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    losses: Mapping[str, float],
    compress: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MODEL", "softmax")
    first, other = own_states(tmp_path, workers=2, protocol="local-sgd:2", compress=compress)
    print(compress, float(first["loss"]), losses["softmax"])
    assert float(first["loss"]) < 1.5 * losses["softmax"]
    assert all(torch.equal(other[key], value) for key, value in first.items())


def compressed_run(folder: Path, task: Any = TASK, **settings: Any) -> Run:
    chosen = {"workers": 3, "path": "collective", "compress": "int8", **settings}
    return train(task, folder, **chosen)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("compress", ["int8", "powersgd:1"])
def test_a_restarted_run_keeps_its_residual(tmp_path: Path, compress: str) -> None:
    """Without it the rest of the run would differ by far more than rounding."""
    inside = Fault(point="inside an all-reduce", call=7)
    settings = {"respawn": True, "checkpoint_every": "1 updates", "compress": compress}
    run = compressed_run(tmp_path / "killed", with_fault(TASK, inside), **settings)
    (resumed,) = [record for record in run.records if isinstance(record, Resumed)]
    assert resumed.version > 1
    assert_each_sample_once(run, NUM_SAMPLES, EPOCHS)
    whole = compressed_run(tmp_path / "whole", compress=compress)
    assert differ(run.state, whole.state) < 1e-9
    assert differ(whole.state, compressed_run(tmp_path / "plain", compress="none").state) > 1e-5


@pytest.mark.timeout(60)
def test_after_a_death_in_a_step_others_continue_through_the_store(tmp_path: Path) -> None:
    """They push whole gradients, and the residual waits."""
    run = compressed_run(tmp_path, with_fault(TASK, Fault(call=4)))
    assert run.left == ["killed by signal 9"]
    assert run.notes == ["peers go on through the store"]
    assert_each_sample_once(run, NUM_SAMPLES, EPOCHS)


@pytest.mark.timeout(60)
def test_the_trace_has_the_compressor_and_the_bytes_sent(tmp_path: Path) -> None:
    run = compressed_run(tmp_path, workers=2)
    header = run.records[0]
    assert isinstance(header, Header)
    assert header.text("compress") == "int8"
    told, compressed = header.fields, run.summary.compressed
    assert 0 < header.number("sent_bytes") < header.number("plain_bytes")
    assert all(told[name] > 0 for name in ("coding_s", "plain_link_s", "sent_link_s"))
    assert compressed is not None
    assert compressed.sent_bytes == run.summary.updates * header.number("sent_bytes")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"protocol": "async"},
            r"compress int8 .*async each push goes to the store by itself; use",
        ),
        ({"path": "store"}, r"compress int8: here gradients stay in the memory of one machine"),
        ({"path": "peers"}, r"compress int8: here gradients stay in the memory of one machine"),
        ({"path": "auto"}, r"compress int8: here gradients stay in the memory of one machine"),
        ({"workers": 1}, r"compress int8 needs workers that send to each other"),
        ({"compress": "int7"}, r"unknown compressor 'int7'; did you mean 'int8'"),
        ({"compress": "topk:0%"}, r"topk:S% needs a percentage S%"),
        ({"compress": "topk:200%"}, r"topk:S% needs a percentage S%"),
        ({"compress": "powersgd:0"}, r"powersgd:R needs R >= 1"),
    ],
)
def test_unsupported_settings_are_refused_at_the_start(
    tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        compressed_run(tmp_path, **settings)


# -- one member's side, without any other ---------------------------------------------------------


def section_of(model: nn.Module) -> Any:
    return lay_out(model.named_parameters(), [], []).parameters


class Mixed(nn.Module):
    """Parameters of several types, three runs of numbers: bfloat16, complex64, float32."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 40)
        self.narrow = nn.Parameter(torch.zeros(16, 32, dtype=torch.bfloat16))
        self.turned = nn.Parameter(torch.zeros(5, dtype=torch.complex64))
        self.last = nn.Conv2d(3, 16, 3).to(memory_format=torch.channels_last)


def made(name: str, seat: int = 0, num_members: int = 1) -> CompressedGradient:
    compression = parse(example(name))
    assert compression is not None
    device = torch.device("cpu")
    return CompressedGradient(compression, section_of(Mixed()), seat, num_members, device)


def exchange_alone(
    compressed: CompressedGradient, block: Tensor, due: Fragment | None = None
) -> Tensor:
    """The mean over one member."""
    mean = block.clone()
    for exchanging in compressed.begin_all(block, 1.0, mean, due):
        operation = next(exchanging)
        while True:
            is_gathered = type(operation).__name__ == "AllGather"
            try:
                operation = exchanging.send(
                    operation.tensor[None] if is_gathered else operation.tensor
                )
            except StopIteration:
                break
    return mean


def a_gradient(seed: int = 0) -> Tensor:
    block = torch.zeros(section_of(Mixed()).stop, dtype=torch.uint8)
    torch.manual_seed(seed)
    for dtype, start, stop in section_of(Mixed()).runs():
        part = Span(start, stop, dtype).of(block)
        part.copy_(torch.randn(len(part)))
    return block


def in_float32(block: Tensor) -> list[Tensor]:
    """A block's numbers, one tensor a run."""
    runs = section_of(Mixed()).runs()
    return [Span(start, stop, dtype).of(block).float() for dtype, start, stop in runs]


@pytest.mark.parametrize("name", COMPRESSORS)
def test_each_fragment_keeps_its_residual(name: str) -> None:
    """One is exchanged at a time: the rest is unchanged, bit for bit."""
    compression, section = parse(example(name)), section_of(Mixed())
    assert compression is not None
    fragments = Fragments(section, 3)
    compressed = CompressedGradient(compression, section, 0, 1, torch.device("cpu"), 3)
    for update in range(7):
        due = fragments.of(update, is_last=update == 4)
        before = [part.clone() for part in compressed.remember()["residual"]]
        block = a_gradient(update)
        mean = exchange_alone(compressed, block, due)
        compressed.keep_fragment(due)
        inside = torch.zeros(section.stop, dtype=torch.uint8)
        inside[due.start : due.stop] = 1
        for (dtype, start, stop), was, now, sent, own in zip(
            section.runs(), before, compressed.remember()["residual"], in_float32(mean),
            in_float32(block), strict=True,
        ):  # fmt: skip
            is_due = inside[start:stop].view(len(now), -1)[:, 0] > 0
            assert torch.equal(now[~is_due], was[~is_due])
            close = 0.02 if dtype is torch.bfloat16 else 1e-6
            expected = (own + was)[is_due]
            torch.testing.assert_close((sent + now)[is_due], expected, rtol=close, atol=close)


@pytest.mark.parametrize("name", COMPRESSORS)
def test_every_dtype_is_compressed_and_nothing_is_lost(name: str) -> None:
    compressed = made(name)
    for update in range(3):
        before = [part.clone() for part in compressed.remember()["residual"]]
        block = a_gradient(update)
        mean = exchange_alone(compressed, block)
        compressed.keep([1] * 6, mean)
        after = compressed.remember()["residual"]
        parts = zip(in_float32(mean), before, after, in_float32(block), strict=True)
        for number, (sent, was, now, own) in enumerate(parts):
            close = 0.02 if number == 0 else 1e-6  # the mean is rounded to bfloat16
            torch.testing.assert_close(sent + now, own + was, rtol=close, atol=close)


@pytest.mark.parametrize("name", COMPRESSORS)
def test_unsent_residual_is_kept_when_gradients_are_cut(name: str) -> None:
    compressed = made(name)
    block = a_gradient()
    compressed.keep([1] * 6, exchange_alone(compressed, block))
    before = compressed.remember()
    places = section_of(Mixed()).places
    ends = [*(place.offset for place in places[1:]), section_of(Mixed()).stop]
    spans = [Span(one.offset, end, one.dtype) for one, end in zip(places, ends, strict=True)]
    compressed.cut(spans[::-1])
    after = compressed.remember()
    for one, other in zip(before["residual"], after["residual"], strict=True):
        assert torch.equal(one, other)
    assert before["common"].keys() == after["common"].keys()
    for key, value in before["common"].items():
        assert torch.equal(value, after["common"][key]), key


def test_each_member_restores_its_residual_or_the_first_takes_the_sum() -> None:
    parts = []
    for seat in range(3):
        kept = made("topk", seat, 1)
        kept.keep([1] * 6, exchange_alone(kept, a_gradient(seat)))
        parts.append(kept.remember())
    for seat in range(3):
        again = made("topk", seat, 3)
        again.go_on(3, parts.__getitem__)
        for results, saved in zip(
            again.remember()["residual"], parts[seat]["residual"], strict=True
        ):
            assert torch.equal(results, saved)
    for num_members in (2, 4):
        members = [made("topk", seat, num_members) for seat in range(num_members)]
        for kept in members:
            kept.go_on(3, parts.__getitem__)
        for run in range(3):
            total = sum(part["residual"][run] for part in parts)
            results = [member.remember()["residual"][run] for member in members]
            torch.testing.assert_close(results[0], total)
            assert not any(result.any() for result in results[1:])


class KeeperOfACheckpoint:
    """A checkpoint with the residual of two members."""

    def __init__(self, parts: Sequence[Mapping[str, Any]]) -> None:
        self._parts = parts

    def add(self, name: str, save: Any, load: Any) -> None:
        load(self._parts[0])

    def add_of_all(self, name: str, save: Any, load: Any) -> None:
        load(len(self._parts), self._parts.__getitem__)


@pytest.mark.parametrize("is_newcomer", [False, True])
def test_a_newcomer_takes_no_residual_from_the_initial_checkpoint(
    is_newcomer: bool,
) -> None:
    """The member it replaces has sent that since, so it would count twice."""
    parts = []
    for seat in range(2):
        member = made("topk", seat, 2)
        member.keep([1] * 6, exchange_alone(member, a_gradient(seat)))
        parts.append(member.remember())
    prepared: Any = SimpleNamespace(
        _context=Context(compress="topk:10%", is_newcomer=is_newcomer),
        _keeper=KeeperOfACheckpoint(parts),
    )
    layout: Any = SimpleNamespace(parameters=section_of(Mixed()))
    replica: Any = SimpleNamespace(layout=layout, device=torch.device("cpu"))
    exchange: Any = SimpleNamespace(hooks=ScriptHooks(), seat=0, num_workers=2)
    Prepared._compress(prepared, exchange, replica)
    results = exchange.hooks.compressed.remember()["residual"]
    assert any(bool(result.any()) for result in results) is not is_newcomer


def test_the_mean_of_an_unstepped_parameter_is_kept() -> None:
    compressed = made("topk")
    block = a_gradient()
    mean = exchange_alone(compressed, block)
    compressed.keep([0, 1, 0, 1, 1, 0], mean)
    places = section_of(Mixed()).places
    for number, run in ((0, 0), (2, 2), (5, 2)):
        place, start = places[number], list(section_of(Mixed()).runs())[run][1]
        at = (place.offset - start) // place.dtype.itemsize
        result = compressed.remember()["residual"][run][at : at + place.numel]
        close = 0.01 if run == 0 else 1e-6
        torch.testing.assert_close(result, place.flat(block).float(), rtol=close, atol=close)


# -- bytes on the wire ---------------------------------------------------------------------------

RANK = """
import os, socket, struct, sys, torch, torch.distributed as dist
from paceline.compression import parse
from paceline.compression.base import UnderWay
from paceline.exchange.compressed import CompressedGradient, GroupLink
from paceline.exchange.group import TorchGroup
from paceline.store.fragments import Fragment, Fragments
from paceline.store.layout import lay_out

folder, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
parameters = {"a": torch.zeros(300, 500), "b": torch.zeros(999), "c": torch.zeros(64, 3, 5, 5)}
section = lay_out(parameters.items(), [], []).parameters

def sent():
    '''Bytes that this process has given to its connections, as the system counts them: each
    once, also where a slow acknowledgement had it send some again.'''
    total = 0
    for number in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(number))) as one:
                    info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 280)
                    sent, again = struct.unpack_from("QQ", info, 200)
                    total += sent - again
        except OSError:
            continue
    return total

for text in sys.argv[4:]:
    compressed = CompressedGradient(parse(text), section, rank, size, torch.device("cpu"))
    block = torch.zeros(section.stop, dtype=torch.uint8)
    block.view(torch.float32).normal_()
    mean = torch.zeros_like(block)
    dist.barrier()
    before = sent()
    for _ in range(4):
        under_way = UnderWay(GroupLink(TorchGroup()))
        for one in compressed.begin_all(block, 1 / size, mean):
            under_way.begin(one)
        under_way.finish()
        compressed.keep([1, 1, 1], mean)
    print(text, (sent() - before) / 4, compressed.sent_bytes, flush=True)
    dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.timeout(90)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_formula_matches_the_bytes_that_the_system_counts(
    tmp_path: Path, num_ranks: int
) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    texts = list(map(example, COMPRESSORS))
    ranks = [
        forked.Forked(
            [tmp_path / "rank.py", tmp_path, rank, num_ranks, *texts], stdout=PIPE, env=env
        )
        for rank in range(num_ranks)
    ]
    for rank in ranks:
        output, _ = rank.communicate(timeout=80)
        assert rank.returncode == 0
        lines = [line.split() for line in output.splitlines()]
        assert [line[0] for line in lines] == texts
        for text, counted, formula in lines:
            # gloo has a header for each part of a message that it sends separately
            assert float(formula) <= float(counted) + 4, text
            assert float(counted) < 1.02 * float(formula) + 3000, text


FROZEN = """
import torch, paceline
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pace = paceline.connect()
torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(data, batch_size=8))
for epoch in pace.epochs(24):
    if epoch == 1:
        model[0].requires_grad_(False)
    for inputs, targets in loader:
        optimizer.zero_grad()
        ((model(inputs) - targets) ** 2).mean().backward()
        norm = pace.clip_grad_norm_([one for one in model.parameters() if one.requires_grad], 9.0)
        optimizer.step()
        assert float(norm) < 9.0, float(norm)
"""


@pytest.mark.parametrize("compress", ["int8", "topk:50%"])
def test_a_frozen_parameter_is_in_no_later_sum(tmp_path: Path, compress: str) -> None:
    """Otherwise its earlier sum would return to its place and be added again each time."""
    script = tmp_path / "train.py"
    script.write_text(FROZEN)
    run = run_script(
        script, tmp_path, workers=2, protocol="full-sync", path="collective", compress=compress
    )
    assert run.summary.updates == 24 * 8


ONCE_BAD = """
import torch, paceline
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pace = paceline.connect()
torch.manual_seed(0)
inputs, targets = torch.randn(48, 4), torch.randn(48, 1)
targets[5] = float("nan")
model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
model[0].bias.requires_grad_(False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(inputs, targets), batch_size=8)
model, optimizer, loader = pace.prepare(model, optimizer, loader)
for epoch in pace.epochs(3):
    for x, y in loader:
        optimizer.zero_grad()
        ((model(x) - y) ** 2).mean().backward()
        optimizer.step()
"""


@pytest.mark.parametrize("compress", ["int8", "int4", "topk:50%", "none"])
def test_one_bad_gradient_skips_one_update(tmp_path: Path, compress: str) -> None:
    """A block that is not finite reaches what no gradient overwrites: frozen ones, and padding."""
    script = tmp_path / "train.py"
    script.write_text(ONCE_BAD)
    run = run_script(
        script, tmp_path, workers=2, protocol="full-sync", path="collective", compress=compress,
        nonfinite="skip",
    )  # fmt: skip
    assert run.summary.updates == 3 * 6
    assert run.summary.skipped_updates == 3


FROZEN_BY_ONE = """
import torch, paceline
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pace = paceline.connect()
torch.manual_seed(0)
inputs, targets = torch.randn(48, 4).double(), torch.randn(48, 1).double()
model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(inputs, targets), batch_size=8)
model, optimizer, loader = pace.prepare(model, optimizer, loader)
for epoch in pace.epochs(2):
    for number, (x, y) in enumerate(loader):
        if number == 2:
            model[0].requires_grad_(pace.worker == 1)
        optimizer.zero_grad()
        ((model(x) - y) ** 2).mean().backward()
        optimizer.step()
    model[0].requires_grad_(True)
pace.save()
"""


def test_a_parameter_frozen_in_one_worker_has_the_others_mean(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(FROZEN_BY_ONE)
    runs = []
    for path in ("collective", "peers"):
        (folder := tmp_path / path).mkdir()
        runs.append(run_script(script, folder, workers=2, protocol="full-sync", path=path))
    for name, value in runs[0].state.items():
        assert torch.allclose(value, runs[1].state[name], rtol=1e-12, atol=1e-12), name
