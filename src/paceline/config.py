"""Every setting of a run with its unit, range and default, and where each value came from.

    defaults  <  file (TOML or YAML)  <  environment (PACELINE_*)  <  flags

One dataclass is the source of the flags of the command line, the keys of the file, the variables
of the environment and the arguments of ``paceline.train``. An unknown key is an error
with a suggestion. Over 300 lines, in one file: half of them are that one table. This module must
not know protocols, devices or tasks: their names are checked by the families that own them.
"""

import math
import operator
import os
import reprlib
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeAlias

from .errors import ConfigError, unknown
from .fields import LARGEST, Value, convert, read_length
from .system.files import open_to_read, read_text

MOST_WORKERS = 1_000_000
"""Limit of a simulated run; `MOST_PROCESSES` is that of a live one."""
MOST_PROCESSES = 1024
_MOST_BYTES = 1 << 20
"""Size limit of a settings file."""
_DEEPEST = 10
PREFIX = "PACELINE_"
OTHER_VARIABLES = ("PACELINE_DATA", "PACELINE_STARTED_BY", "PACELINE_ANEW")
"""Our environment variables that are not settings of a run."""
FILE_NAMES = ("paceline.toml", "paceline.yaml", "paceline.yml")
"""Files in the current folder, the first of which is read if none is named."""


def _setting(
    default: object,
    text: str,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    hint: str = "",
    separator: str | None = None,
) -> Any:
    """A dataclass field with its help text, its range and what to try when a value is refused.

    Args:
        separator: what separates several values in one text; None: spaces.
    """
    metadata = {
        "help": text, "least": least, "above": above, "most": most, "hint": hint,
        "separator": separator,
    }  # fmt: skip
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """All settings of one run; every field is checked, so what exists is in range.

    Raises:
        ConfigError: a value is out of range, or settings exclude each other.
    """

    workers: int = _setting(
        1, "Number of worker processes.", least=1, most=MOST_WORKERS,
        hint="one worker is the least that can train, and one machine runs at most a few thousand",
    )  # fmt: skip
    protocol: str = _setting(
        "full-sync",
        "When gradients are combined: full-sync, k-sync:K, k-batch-sync:K, async, k-async:K, "
        "k-batch-async:K, stale-synchronous:S, local-sgd:H, post-local-sgd:N,H, adaptive or "
        "adaptive-local:H.",
    )
    staleness: str = _setting(
        "none",
        "What a stale gradient is worth: none (all of it), inverse (1 / (staleness + 1)), "
        "distance:C (a step of at most C / squared distance), drop:S (nothing beyond S versions).",
    )
    outer: str = _setting(
        "none",
        "Under local-sgd, how the mean of the workers' differences is applied: none (they are "
        "averaged), or as a step of SGD: sgd:LR, momentum:LR,B, nesterov:LR,B (DiLoCo: "
        "nesterov:0.7,0.9).",
    )
    fragments: int = _setting(
        1,
        "Under local-sgd:H, exchange the parameters in this many parts, one every H/F local steps: "
        "1/F of the bytes at a time.",
        least=1,
    )
    overlap: int = _setting(
        0,
        "Number of local steps, below H/F, that workers continue during an exchange of local-sgd "
        "before its result is merged.",
        least=0,
    )
    engine: Literal["local", "inline", "torchrun"] = _setting(
        "local",
        "Where workers run: local (processes of this machine), inline (one process, for "
        "debugging) or torchrun (in processes that torchrun started).",
    )
    preload: tuple[str, ...] = _setting(
        (),
        "Import these modules once, before the workers start, instead of in each of them: "
        "lightning, transformers.",
        separator=",",
    )
    split: str = _setting(
        "data",
        "How the model is divided: data or none (each worker has all of it), network[:N] (N parts, "
        "one after the other), layer[:N] (pairs of layers over their channels), AxB (A parts in B "
        "copies), shard[:1|2|3] (pieces: ZeRO).",
    )
    batch_size: int | None = _setting(
        None,
        "Number of samples in an update of a task, over all workers; a script sets it in its "
        "loader.",
        least=1,
    )
    mini_batch_size: int | None = _setting(
        None,
        "Number of samples of a task that a worker takes at once; an update averages K times as "
        "many. A script calls prepare(..., batch='per-worker').",
        least=1,
    )
    accumulate: int | None = _setting(
        None,
        "Number of batches that an update averages, for a loop that steps on each.",
        least=1,
    )
    lr: float | None = _setting(
        None, "Learning rate of a task; a script sets it in its optimizer.", above=0
    )
    scale_lr: Literal["none", "linear", "sqrt"] = _setting(
        "none",
        "Scale the learning rate by the samples that an update averages, over those of the batch "
        "that it was chosen for: the task's or the loader's own.",
    )
    warmup: str | None = _setting(
        None,
        "Warm the learning rate up over this long, from its value before scaling or "
        "from 0: 5ep (epochs) or 200 (updates).",
    )
    epochs: int | None = _setting(None, "Stop after this many passes over the data.", least=1)
    updates: int | None = _setting(None, "Stop after this many updates.", least=1)
    seconds: float | None = _setting(None, "Stop after this many seconds.", above=0)
    target_accuracy: float | None = _setting(
        None, "Stop at this test accuracy (0 to 1).", above=0, most=1,
        hint="write 0.85 for 85 %",
    )  # fmt: skip
    device: str = _setting("auto", "Where workers compute: auto, cpu, cuda, cuda:1, mps, xpu.")
    seed: int = _setting(0, "Seed of the weights and of the data's order.", least=0, most=2**63 - 1)
    deterministic: bool = _setting(
        False,
        "Use only deterministic operations; an operation without a deterministic form is an error.",
    )
    dropped: Literal["requeue", "skip"] = _setting(
        "requeue",
        "What happens to abandoned mini-batches: train them later (requeue), or drop them as "
        "in the papers (skip).",
    )
    slow: tuple[str, ...] = _setting((), "Make one worker slow: 1=5x; in phases 1=5x@60s/10s.")
    delay: tuple[str, ...] = _setting(
        (), "Delay each mini-batch: 20ms, exp:20ms, 10ms+exp:5ms, pareto:2,10ms, 1=exp:20ms."
    )
    fault: tuple[str, ...] = _setting(
        (),
        "Inject a fault, to test how the run handles it: 'kill worker 1 at update 100'.",
        separator=";",
    )
    respawn: bool = _setting(
        False, "Start a new worker in place of one that died, and restart the run if all died."
    )
    on_worker_error: Literal["fail", "continue"] = _setting(
        "fail",
        "What happens after a worker's exception: the run ends (fail), or the others continue "
        "(continue).",
    )
    stall_after: float | None = _setting(
        None, "Give up a worker that has been asleep or stopped for this many seconds.", above=0
    )
    init: str | None = _setting(
        None, "Weights of a task at the start: default is torch's; otherwise the task's own."
    )
    nonfinite: Literal["error", "skip"] = _setting(
        "error",
        "What happens after a loss or gradient that is not finite: the run ends (error), or the "
        "update is skipped (skip).",
    )
    parameters: bool = _setting(
        False, "Show each layer in the plan: type, shapes, parameters, trainable ones, MB."
    )
    log: Literal["csv", "tensorboard", "wandb", "mlflow"] | None = _setting(
        None,
        "Also write the metrics in this format; tensorboard, wandb and mlflow need their clients.",
    )
    keep_best: bool = _setting(
        False, "Keep the parameters with the best test accuracy, else test loss."
    )
    run_dir: str | None = _setting(None, "Write the run into this folder.")
    name: str | None = _setting(None, "Name of the run's folder under runs/.")
    resume: str | None = _setting(
        None, "Resume this run: its folder, its name, latest, or auto (if there is one)."
    )
    checkpoint_every: str = _setting(
        "2min", "Save the run this often: 30s, 5min, 500 updates, 1 epoch or never."
    )
    keep: int = _setting(2, "Number of checkpoints to keep.", least=1)
    dry_run: bool = _setting(False, "Show the plan and stop.")
    json: bool = _setting(False, "Print one JSON object on standard output, and nothing else.")
    threads: int | None = _setting(
        None, "Number of threads that each worker computes with.", least=1, most=MOST_PROCESSES
    )
    fast: Literal["none", "auto"] = _setting(
        "none",
        "Measure which options make a step faster on this model and machine, and use those (auto).",
    )
    precision: Literal["fp32", "bf16", "fp16", "auto"] | None = _setting(
        None,
        "Number format of forward passes under pace.autocast(); with auto, --fast auto may try 16 "
        "bits.",
    )
    compile: Literal["none", "default", "reduce-overhead", "max-autotune"] = _setting(
        "none", "Compile the model's training passes, in this mode of torch.compile."
    )
    channels_last: bool = _setting(
        False, "Store the weights of convolutions in the channels-last format."
    )
    keep_memory: Literal["auto", "always", "never"] = _setting(
        "auto",
        "Let a worker keep freed memory for its next step; auto: on a CPU, with glibc, if the "
        "model is not split.",
    )
    fused_optimizer: bool = _setting(
        False, "Run the optimizer's step as one kernel, where possible."
    )
    loader_workers: int | None = _setting(
        None,
        "Number of processes that each worker loads its batches with.",
        least=0,
        most=MOST_PROCESSES,
    )
    copies_ahead: bool = _setting(
        False, "Copy the next batch to the accelerator while this one is computed."
    )
    path: Literal["auto", "store", "peers", "collective"] = _setting(
        "auto",
        "How gradients move: through the store, between peers in shared memory, or by "
        "torch.distributed (one accelerator a worker).",
    )
    collective: str = _setting(
        "auto",
        "How workers' gradients are summed: auto, shared (memory that all see), native "
        "(torch.distributed's own), or a schedule: ring, bidirectional-ring, tree, double-tree, "
        "hub[:R], fully-connected, halving-doubling, bine or hierarchical:G.",
    )

    compress: str = _setting(
        "none",
        "Send gradients in fewer bytes where torch.distributed carries them: none, fp16, bf16, "
        "int8, int4, topk:S% or powersgd:R.",
    )

    def __post_init__(self) -> None:
        for name in (setting.name for setting in fields(self)):
            object.__setattr__(self, name, check(name, getattr(self, name)))
        if self.batch_size is not None and self.mini_batch_size is not None:
            raise _both_batches("")
        try:
            read_length(self.warmup)
        except ValueError as error:
            raise ConfigError(f"warmup must be {error}, got {self.warmup!r}") from None
        if self.deterministic and self.engine == "inline":
            raise ConfigError(
                "deterministic sets torch's switches for a whole process, and engine 'inline' runs "
                "in the calling process: use engine 'local', or call "
                "torch.use_deterministic_algorithms(True) yourself"
            )
        for name in ("run_dir", "resume"):
            if getattr(self, name) == "":
                raise ConfigError(
                    f"{name} is empty: is a variable not set? Give a value, or leave it out"
                )
        if self.name is not None and ("/" in self.name or self.name in ("", ".", "..", "latest")):
            raise ConfigError(
                f"name must be a plain folder name other than 'latest', got {self.name!r}; "
                "for another place use run_dir"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """The settings, and for each where it came from: default, a file, a variable or a flag."""

    settings: RunSettings
    origins: Mapping[str, str]


TYPES: Mapping[str, Any] = typing.get_type_hints(RunSettings)
"""Type of each setting by its name."""
NAMES: tuple[str, ...] = tuple(TYPES)


def resolve(
    flags: Mapping[str, object],
    file: Path | None = None,
    env: Mapping[str, str] | None = None,
    *,
    is_call: bool = False,
) -> Resolved:
    """Join all sources of settings; the later ones win.

    Args:
        flags: the settings given explicitly, by the names of ``RunSettings``.
        file: a TOML or YAML file; None: the first of ``FILE_NAMES`` in the current folder, if any.
        env: the environment; None: this process's.
        is_call: whether the flags are arguments of a Python call; messages then name them so.

    Raises:
        ConfigError: an unknown name, a wrong type or range, with its origin.
    """
    return _joined(_from_file(file), _from_env(env), _from_flags(flags, is_call))


def of_flags(flags: Mapping[str, object], *, is_call: bool = False) -> RunSettings:
    """Settings from flags alone, without file and environment, for predictions and comparisons.

    Args, Raises: as for `resolve`.
    """
    return _joined(_from_flags(flags, is_call)).settings


def _joined(*layers: "_Layer") -> Resolved:
    """Join the layers; later ones win."""
    values: dict[str, Value] = {}
    origins = dict.fromkeys(NAMES, "default")
    for layer in layers:
        given = {name: (value, origin) for name, value, origin in layer}
        if "batch_size" in given and "mini_batch_size" in given:
            raise _both_batches(f" ({given['mini_batch_size'][1]})")
        for name, (value, origin) in given.items():
            values[name], origins[name] = value, origin
            # A later layer also chooses the convention: its batch replaces an earlier layer's.
            other = {"batch_size": "mini_batch_size", "mini_batch_size": "batch_size"}.get(name)
            if other is not None and value is not None and values.pop(other, None) is not None:
                origins[other] = "default"
    return Resolved(settings=RunSettings(**typing.cast(Any, values)), origins=origins)


def check(name: str, value: object, where: str = "") -> Value:
    """``value`` as the type of setting ``name``, in its range.

    Raises:
        ConfigError: it is of another type or out of range; names ``where`` it came from.
    """
    place = f" ({where})" if where else ""
    try:
        converted = convert(_apart(name, value), TYPES[name])
    except ValueError as error:
        raise ConfigError(f"{name} must be {error}, got {reprlib.repr(value)}{place}") from None
    _check_range(name, converted, place)
    return converted


def _apart(name: str, value: object) -> object:
    """The value; a text with several values is split at the setting's separator."""
    separator = RunSettings.__dataclass_fields__[name].metadata["separator"]
    if separator is None or not isinstance(value, str):
        return value
    return [word.strip() for word in value.split(separator) if word.strip()]


def help_of(name: str) -> str:
    """The sentence that explains a setting."""
    return str(RunSettings.__dataclass_fields__[name].metadata["help"])


def default_of(name: str) -> Value:
    """The default of a setting."""
    return typing.cast(Value, RunSettings.__dataclass_fields__[name].default)


def flag_of(name: str) -> str:
    """The flag of a setting: ``--batch-size``."""
    return "--" + name.replace("_", "-")


def refuse_too_many(num: int, flag: str) -> None:
    """Raise ConfigError for more processes than one machine carries."""
    if num > MOST_PROCESSES:
        raise ConfigError(f"{flag} must be <= {MOST_PROCESSES}, got {num}")


def _check_range(name: str, value: Value, place: str) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return
    rules = RunSettings.__dataclass_fields__[name].metadata
    hint = f"; {rules['hint']}" if rules["hint"] else ""
    if isinstance(value, int) and abs(value) > LARGEST:
        raise ConfigError(
            f"{name} must fit into 64 bits, got a number of {value.bit_length()} bits{place}"
        )
    for rule, sign, is_kept in _RANGES:
        bound = rules[rule]
        if bound is not None and not is_kept(value, bound):
            raise ConfigError(f"{name} must be {sign} {bound}, got {value}{place}{hint}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{name} must be finite, got {value}{place}{hint}")


_RANGES = (("least", ">=", operator.ge), ("above", ">", operator.gt), ("most", "<=", operator.le))
_Layer: TypeAlias = Iterator[tuple[str, Value, str]]


def _from_file(file: Path | None) -> _Layer:
    if file is None:
        file = next((Path(name) for name in FILE_NAMES if Path(name).is_file()), None)
        if file is None:
            return
    for key, value in _read(file).items():
        name = str(key).replace("-", "_")
        if name not in NAMES:
            raise unknown("setting", str(key), NAMES, str(file))
        yield name, check(name, value, str(file)), str(file)


def _read(file: Path) -> Mapping[object, object]:
    """The keys and values of a settings file; ConfigError if it cannot be read or parsed."""
    try:
        text = read_text(open_to_read(file), _MOST_BYTES)
    except OSError as error:
        raise ConfigError(f"the settings file {file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"the settings file {file} is not UTF-8 text: {error}") from None
    if file.suffix == ".toml":
        import tomllib

        try:
            return typing.cast(Mapping[object, object], tomllib.loads(text))
        except (ValueError, RecursionError) as error:  # also for invalid numbers and dates
            raise ConfigError(f"{file} is not valid TOML: {error}") from None
    if file.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"a settings file must end in .toml, .yaml or .yml, got {file}")
    import yaml

    try:
        _refuse_nested(yaml.scan(text), file)
        content = yaml.safe_load(text) or {}
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"{file} is not valid YAML: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{file} must hold lines like 'workers: 4', got {type(content).__name__}")
    return content


def _refuse_nested(tokens: Iterable[object], file: Path) -> None:
    """ConfigError for aliases and deep nesting, by which a few bytes expand to billions."""
    depth = 0
    for token in tokens:
        name = type(token).__name__
        if name == "AliasToken":
            raise ConfigError(f"{file} uses a YAML alias (*): write each value out")
        depth += name.endswith(("SequenceStartToken", "MappingStartToken"))
        depth -= name.endswith("EndToken")
        if depth > _DEEPEST:
            raise ConfigError(
                f"{file} is not valid YAML: it is nested more than {_DEEPEST} levels deep"
            )


def _from_env(env: Mapping[str, str] | None) -> _Layer:
    for variable, text in (os.environ if env is None else env).items():
        if not variable.startswith(PREFIX) or variable in OTHER_VARIABLES or not text:
            continue
        name = variable.removeprefix(PREFIX).lower()
        if name not in NAMES:
            known = (*(PREFIX + name.upper() for name in NAMES), *OTHER_VARIABLES)
            raise unknown("variable", variable, known, "environment")
        yield name, check(name, text, variable), variable


def _from_flags(flags: Mapping[str, object], is_call: bool) -> _Layer:
    for name, value in flags.items():
        if name not in NAMES:
            raise unknown("setting", name, NAMES)
        origin = f"argument {name}" if is_call else flag_of(name)
        yield name, check(name, value, origin), origin


def _both_batches(place: str) -> ConfigError:
    return ConfigError(
        f"batch_size and mini_batch_size exclude each other{place}: batch_size is the samples of "
        "an update over all workers, mini_batch_size those that a worker takes at once"
    )
