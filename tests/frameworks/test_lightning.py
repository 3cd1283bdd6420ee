"""A Lightning Trainer trains under any protocol as it does alone and under DDP."""

import contextlib
import inspect
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import forked
from paceline.errors import ConfigError
from paceline.events import Grant
from paceline.program import ScriptProgram
from paceline.script import worker
from paceline.trace.records import Handed, Ordered
from runs import Run, assert_each_sample_once, run_script

lightning = pytest.importorskip("lightning")

SCRIPT = Path(__file__).parent / "lit.py"
NUM_SAMPLES, BATCH = 48, 8
PRELOAD = ("lightning",)
"""Importing it takes longer than any training here."""


def say(folder: Path, **options: Any) -> tuple[str, str]:
    folder.mkdir()
    return str(folder), json.dumps(options)


def by_python(folder: Path, **options: Any) -> list[dict[str, Any]]:
    """The result of each worker; the script starts the workers itself."""
    done = forked.run([SCRIPT, *say(folder, **options)], cwd=folder, preload=PRELOAD)
    assert done.returncode == 0, done.stdout + done.stderr
    return left_in(folder)


def by_launch(
    folder: Path, runs: str, num: int = 2, fault: tuple[str, ...] = (), **options: Any
) -> tuple[Run, list[dict[str, Any]]]:
    words = say(folder, **options)
    # Without a delay a worker may be cancelled each time before it has logged anything.
    delay = ("exp:5ms",) if runs == "k-sync:1" else ()
    run = run_script(
        SCRIPT, folder, *words, workers=num, protocol=runs, fault=fault, delay=delay,
        preload=PRELOAD,
    )  # fmt: skip
    return run, left_in(folder)


def test_worker_cancelled_every_time_ends_with_the_others(tmp_path: Path) -> None:
    for number in range(3):  # the case occurs in most runs
        folder = tmp_path / str(number)
        words = say(folder, epochs=3)
        run = run_script(SCRIPT, folder, *words, workers=2, protocol="k-sync:1", preload=PRELOAD)
        assert [(one["step"], one["epoch"]) for one in left_in(folder)] == [(18, 3), (18, 3)]
        assert_each_sample_once(run, NUM_SAMPLES, 3)


def left_in(folder: Path) -> list[dict[str, Any]]:
    return [torch.load(path, weights_only=False) for path in sorted(folder.glob("worker-*.pt"))]


WAYS: dict[str, dict[str, Any]] = {
    "epoch schedule, norm clipped": {"trainer": {"gradient_clip_val": 0.3}},
    "step schedule, groups of four": {
        "schedule": "step",
        "trainer": {"accumulate_grad_batches": 4},
    },
    "plateau, stopped early, values clipped": {
        "schedule": "plateau",
        "patience": 0,
        "epochs": 5,
        "trainer": {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"},
    },
    "groups of two, then none": {
        "epochs": -1,
        "groups": {"0": 2, "1": 1},
        "trainer": {"max_steps": 5},
    },
    "so many steps": {"epochs": -1, "trainer": {"max_steps": 9}},
}


def by_ddp(folder: Path, **options: Any) -> list[dict[str, Any]]:
    trainer = {"use_distributed_sampler": False, **options["trainer"]}
    plain = {**options, "trainer": trainer}
    return by_python(folder, strategy="ddp", workers=2, batch=BATCH // 2, **plain)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("way", WAYS)
def test_full_sync_equals_one_process_and_ddp(way: str, tmp_path: Path) -> None:
    """float64 sums in another order: 1e-12 for values of about 1."""
    options = WAYS[way]
    (alone,) = by_python(tmp_path / "alone", strategy="single", **options)
    # That DDP equals one process is Lightning's own claim: one way shows that both agree.
    ddp = by_ddp(tmp_path / "ddp", **options) if way == next(iter(WAYS)) else []
    if ddp:  # a script that starts its own workers also starts the fork server
        ours = by_python(
            tmp_path / "ours", workers=2, protocol="full-sync",
            settings={"run_dir": "run", "preload": PRELOAD}, **options,
        )  # fmt: skip
    else:
        _, ours = by_launch(tmp_path / "ours", "full-sync", **options)
    assert len(ours) == 2
    assert all(one["ranks"] == [0.0, 1.0] for one in (*ddp, *ours))  # all_gather
    for one in (*ddp, *ours):
        assert one["state"].keys() == alone["state"].keys()
        for name, value in one["state"].items():
            torch.testing.assert_close(value, alone["state"][name], rtol=0, atol=1e-12)
        for name in ("step", "epoch", "steps"):
            assert one[name] == alone[name], name
        for name in ("rate", "losses", "train_loss"):
            assert one[name] == pytest.approx(alone[name], abs=1e-12), name
        assert Path(one["best"]).name == Path(alone["best"]).name
    for one in ours:  # DistributedDataParallel sums the validation of each rank
        assert one["sums"] == pytest.approx(alone["sums"], abs=1e-12)


def test_mean_over_workers_is_weighted_by_samples() -> None:
    """Lightning divides the mean of the sums by the mean of the sample counts."""
    from paceline.lightning import PacelineStrategy

    sums = {51: 101.0, 1: 2.0}
    strategy: Any = SimpleNamespace(
        _can_sum=True,
        is_each_its_own=False,
        pace=SimpleNamespace(sum=lambda value: torch.tensor(sums[int(value)]).double()),
    )
    mean = PacelineStrategy._reduced(strategy, torch.tensor(51), "mean")
    assert mean.item() == 50.5
    assert PacelineStrategy._reduced(strategy, torch.tensor(51), "sum").item() == 101


@pytest.mark.parametrize(
    ("name", "made_by", "prepares", "is_waited_for"),
    [
        ("Trainer.save_checkpoint", lightning.Trainer.save_checkpoint, False, True),
        ("pre_setup", lightning.pytorch.trainer.call._call_setup_hook, True, True),
        ("pre_setup", lightning.pytorch.trainer.call._call_setup_hook, False, False),
        ("post_setup", lightning.pytorch.trainer.call._call_setup_hook, True, False),
    ],
)
def test_after_training_workers_wait_for_what_the_main_worker_writes(
    name: str, made_by: Callable[..., object], prepares: bool, is_waited_for: bool
) -> None:
    from paceline.lightning import PacelineStrategy

    class Preparing(lightning.LightningDataModule):
        def prepare_data(self) -> None: ...

    blocks = list[str]()

    @contextlib.contextmanager
    def once() -> Iterator[bool]:
        blocks.append(name)
        yield False

    strategy: Any = SimpleNamespace(
        _is_over=True, _has_prepared=True, _can_sum=False, world_size=2,
        pace=SimpleNamespace(once=once), lightning_module=lightning.LightningModule(),
    )  # fmt: skip
    trainer = SimpleNamespace(datamodule=Preparing() if prepares else None)
    strategy.lightning_module._trainer = trainer
    strategy._prepares_data = partial(PacelineStrategy._prepares_data, strategy)
    assert f'barrier("{name}")' in inspect.getsource(made_by), "Lightning calls it otherwise now"
    PacelineStrategy.barrier(strategy, name)
    assert blocks == [name] * is_waited_for


def num_pushed(run: Run, epoch: int) -> int:
    """Samples of an epoch that workers pushed, also too late; not those of cancelled steps."""
    epochs, total = dict[tuple[int, ...], int](), 0
    for record in run.records:
        match record:
            case Ordered(order=Grant(ticket, leases)) if leases:
                epochs[ticket[:2]] = leases[0].epoch
            case Handed(fact=fact):
                total += fact.num_samples * (epochs[fact.ticket[:2]] == epoch)
    return total


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("protocol", "workers"),
    [("k-batch-async:2", 2), ("async", 2), ("k-sync:1", 2), ("local-sgd:2", 2), ("k-async:3", 4)],
)
def test_each_sample_counts_once_per_epoch(protocol: str, workers: int, tmp_path: Path) -> None:
    run, results = by_launch(tmp_path / "run", protocol, workers, epochs=3)
    assert_each_sample_once(run, NUM_SAMPLES, 3)
    assert len(results) == workers
    assert [result["num"] for result in results] == [num_pushed(run, epoch=2)] * workers
    num_updates = run.summary.updates
    assert num_updates == (9 if protocol.startswith("local") else 18)
    for result in results:
        assert result["step"] == num_updates
        assert result["epoch"] == 3
        assert result["steps"] == sorted(result["steps"])
        assert result["rate"] == pytest.approx(0.1 * 0.9**3)
        for name in (
            "losses",
            "best",
            "train_loss",
        ):  # each validated all samples and decided the same
            assert result[name] == results[0][name]
        for name, value in result["state"].items():
            assert torch.equal(value, results[0]["state"][name])
    assert Path(results[0]["best"]).is_file()


def test_max_steps_limits_updates(tmp_path: Path) -> None:
    run, results = by_launch(tmp_path / "run", "async", epochs=-1, trainer={"max_steps": 9})
    assert run.summary.updates == 9
    assert [result["step"] for result in results] == [9, 9]
    # Two each: after the whole epoch, and at the end.
    assert [len(result["losses"]) for result in results] == [2, 2]


@pytest.mark.timeout(300)
def test_training_continues_without_the_main_worker(tmp_path: Path) -> None:
    fault = ("kill worker 0 at update 5",)
    run, results = by_launch(tmp_path / "run", "async", 3, fault, epochs=3)
    assert run.left  # it was killed
    assert_each_sample_once(run, NUM_SAMPLES, 3)
    assert [result["step"] for result in results] == [18, 18]
    # all_gather covers the living workers; the new main worker has the main worker's rank.
    assert [result["ranks"] for result in results] == [[0.0, 2.0]] * 2
    assert Path(results[0]["best"]).is_file()  # of version 6 or later, saved by the new main worker


def test_early_stopping_stops_all_workers(tmp_path: Path) -> None:
    run, results = by_launch(tmp_path / "run", "async", epochs=50, stop=[1, 3])
    assert run.summary.updates < 50
    assert {result["step"] for result in results} == {run.summary.updates}
    assert results[0]["epoch"] == results[1]["epoch"] < 50


@pytest.mark.timeout(300)
def test_trainer_resumes_from_its_own_checkpoint(tmp_path: Path) -> None:
    _, whole = by_launch(tmp_path / "whole", "full-sync", epochs=3)
    by_launch(tmp_path / "first", "full-sync", epochs=1)
    kept = str(tmp_path / "first" / "kept" / "last.ckpt")
    run, rest = by_launch(tmp_path / "rest", "full-sync", epochs=3, ckpt_path=kept)
    assert run.summary.updates == 12
    assert rest[0]["step"] == whole[0]["step"] == 18
    assert rest[0]["epoch"] == 3
    for name, value in rest[0]["state"].items():
        torch.testing.assert_close(value, whole[0]["state"][name], rtol=0, atol=1e-12)


def test_run_with_conflicting_settings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="paceline launch --protocol async, or PacelineStrategy"):
        by_launch(tmp_path / "protocol", "full-sync", protocol="async")
    with pytest.raises(ConfigError, match=r"devices=3.*paceline launch --workers 3"):
        by_launch(tmp_path / "devices", "full-sync", workers=3)
    with pytest.raises(ConfigError, match="was given seed, but this run was started by paceline"):
        by_launch(tmp_path / "settings", "full-sync", settings={"seed": 3})
    with pytest.raises(ConfigError, match="accumulate_grad_batches under async, where a worker"):
        by_launch(tmp_path / "groups", "async", trainer={"accumulate_grad_batches": 2})


def test_script_error_is_reported_with_exit_code_1(tmp_path: Path) -> None:
    words = say(tmp_path / "run", workers=2, schedule="never", settings={"run_dir": "run"})
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *words], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 1
    assert "error: worker" in done.stderr
    assert "never" in done.stderr


# -- refusals before the first step ----------------------------------------------------------------


class Plain(lightning.LightningModule):  # type: ignore[name-defined, misc]
    def __init__(self, num_optimizers: int = 1) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.num_optimizers = num_optimizers

    def training_step(self, batch: list[Tensor]) -> Tensor:
        raise AssertionError("the first step was taken")

    def configure_optimizers(self) -> Any:
        if not self.num_optimizers:
            return None
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Manual(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Bptt(Plain):
    truncated_bptt_steps = 4


class ByIterator(Plain):
    def training_step(self, dataloader_iter: Iterator[Any]) -> Tensor:
        raise AssertionError("the first step was taken")


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        yield torch.zeros(3)


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.zeros(8, 3)), batch_size=4)


def fit(module: Any, data: Any = None, **options: Any) -> None:
    from paceline.lightning import PacelineStrategy

    trainer = lightning.Trainer(
        strategy=PacelineStrategy(), accelerator="cpu", devices=1, max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        **options,
    )  # fmt: skip
    trainer.fit(module, loader() if data is None else data)


REFUSED: dict[str, Callable[[], None]] = {
    "manual optimization": lambda: fit(Manual()),
    "truncated backpropagation": lambda: fit(Bptt()),
    "training_step(dataloader_iter)": lambda: fit(ByIterator()),
    "gave 0 optimizers": lambda: fit(Plain(0)),
    "is an IterableDataset": lambda: fit(Plain(), DataLoader(Stream())),
    "join the data sets in one": lambda: fit(Plain(), [loader(), loader()]),
    "val_check_interval=0.5": lambda: fit(Plain(), val_check_interval=0.5),
    "val_check_interval=1": lambda: fit(Plain(), val_check_interval=1),
    "val_check_interval='a time'": lambda: fit(Plain(), val_check_interval="00:00:10:00"),
    "precision='16-true'": lambda: fit(Plain(), precision="16-true"),
    "reload_dataloaders_every_n_epochs": lambda: fit(Plain(), reload_dataloaders_every_n_epochs=1),
    "sync_batchnorm=True": lambda: fit(Plain(), sync_batchnorm=True),
    "num_nodes=2": lambda: fit(Plain(), num_nodes=2),
    "callback StochasticWeightAveraging": lambda: fit(
        Plain(), callbacks=[lightning.pytorch.callbacks.StochasticWeightAveraging(0.1)]
    ),
}


@pytest.mark.parametrize("words", REFUSED)
def test_unsupported_options_are_refused_by_name(words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        REFUSED[words]()
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("protocol", "options", "words"),
    [
        ("async", {"every_n_train_steps": 10}, "every_n_train_steps=10) under async"),
        ("full-sync", {"train_time_interval": timedelta(seconds=1)}, "train_time_interval="),
        ("full-sync", {"every_n_train_steps": 10}, ""),
        ("async", {"every_n_epochs": 1}, ""),
    ],
)
def test_checkpoints_decided_per_worker_are_refused(
    protocol: str, options: dict[str, Any], words: str
) -> None:
    from paceline.lightning import starting

    kept = lightning.pytorch.callbacks.ModelCheckpoint(**options)
    trainer: Any = SimpleNamespace(
        precision="32-true", val_check_interval=1.0, check_val_every_n_epoch=1,
        reload_dataloaders_every_n_epochs=0, accumulate_grad_batches=1, callbacks=[kept],
    )  # fmt: skip
    context = SimpleNamespace(
        protocol=protocol, is_spmd=protocol == "full-sync", is_difference=False
    )
    trainer.strategy = SimpleNamespace(pace=SimpleNamespace(num_workers=2, context=context))
    result = starting._option_not_carried(trainer, None, 1)
    assert words in result
    assert bool(words) == bool(result)


@pytest.mark.parametrize("word", [(1, 2), {0: "a"}, torch.ones(1), {1}, [(1,)]])
def test_objects_changed_by_json_are_not_broadcast(word: object) -> None:
    from paceline.lightning import strategy

    with pytest.raises(ConfigError, match=type(word).__name__):
        strategy._as_json(word)
    assert json.loads(strategy._as_json({"a": [1, 2.5, None, True]})) == {"a": [1, 2.5, None, True]}


def test_unsupported_lightning_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.lightning import PacelineStrategy

    monkeypatch.setattr(lightning, "__version__", "3.0.1")
    with pytest.raises(ConfigError, match=r"lightning 2\.6, but this is 3\.0\.1: pip install"):
        PacelineStrategy()


def test_other_launchers_are_refused_with_the_command_to_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from paceline.lightning import PacelineStrategy

    for name in ("exchange", "pace"):  # as if this process had never connected
        monkeypatch.setattr(worker._here, name, None)
    for name, value in {
        "RANK": 1,
        "LOCAL_RANK": 1,
        "WORLD_SIZE": 2,
        "MASTER_ADDR": "node1",
    }.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(ConfigError, match=r"this is rank 1 of 2: .* paceline launch --workers 2"):
        PacelineStrategy()


def test_task_settings_are_refused_by_the_strategy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from paceline.lightning import starting

    monkeypatch.setattr(starting, "_this_script", lambda: ScriptProgram(path="train.py"))
    with pytest.raises(ConfigError, match=r"lr 0.1 \(argument lr\) is for tasks"):
        starting.Starter(None, {"lr": 0.1}).run([torch.device("cpu")])


def test_importing_paceline_does_not_import_lightning() -> None:
    code = "import sys, paceline, paceline.cli.app; print('lightning' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "False"
