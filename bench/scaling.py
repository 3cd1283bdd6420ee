"""The gain from a second worker, and the load of a hundred on the store.

    python bench/scaling.py [--blocks 9] [--quick] [--write]

1. LeNet, mini-batch 256, full-sync: one worker with one thread on one core against two such, each
   on a core of its own, and the bound: plain processes that exchange nothing. They are alive at
   once and take turns, block by block:

       one, two                Paceline
       again                   two workers once more: how far equal figures differ on this machine
       plain one, plain two    no exchange: what memory and clock leave of a second core

   efficiency = time of a step of one over that of two; the mini-batch of a worker is the same.
2. The store's load: workers 2 to 100 (real processes) push a ready gradient of LeNet under async,
   with a step that costs nothing (bench/pushes.py). Nothing else uses the store's memory, so the
   time of its link for one push of each worker is the workers over the pushes a second. Its memory
   is the touched pages beyond the workers' own slots.
3. Shards: the parameters of a run are one piece; ``paceline.KVStore`` has shards. The time for
   which each shard is held while every key is pushed once; the fullest shard counts.

Writes results/scaling.md and results/scaling.svg.
"""

import argparse
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

import pushes
from paceline import KVStore
from paceline.config import RunSettings
from paceline.engines.local.engine import LocalEngine
from paceline.launch.launcher import Host, launch_run
from paceline.program import ScriptProgram
from paceline.report.chart import Curve, Diagram, draw_chart
from paceline.report.live import QuietObserver
from paceline.report.text import Point
from paceline.store.layout import lay_out
from paceline.store.parameter_store import arena_bytes
from paceline.workloads.images import build_lenet
from quiet_runs import records_of, update_times_s
from table import RESULTS, interval, machine, spread, write_table
from worlds import World

MINI_BATCH, STEPS = 256, 10
WANTED_OF_BOUND, WANTED_MEMORY, WANTED_SHARE = 0.95, 3.0, 0.2
WORKERS, UPDATES = (2, 10, 30, 100), 4_000
SHARDS = (1, 2, 3, 4)
EQUAL_KEYS = {f"layer {number}": torch.ones(1 << 16) for number in range(24)}
"""Keys of a model with equal layers; their number is a multiple of each number of shards."""


# -- 1. a second worker ----------------------------------------------------------------------------


def measure_worlds(blocks: int) -> dict[str, list[float]]:
    """Return the milliseconds of a step, by world."""
    total = STEPS * (blocks + 1)
    roles = {
        "one": ("pace", 1), "two": ("pace", 2), "again": ("pace", 2),
        "plain one": ("bound", 1), "plain two": ("bound", 2),
    }  # fmt: skip
    worlds = {
        name: World(
            role, model="lenet", batch=MINI_BATCH * number, total=total, world=number,
            cores=tuple(range(number)),
        )
        for name, (role, number) in roles.items()
    }  # fmt: skip
    times: dict[str, list[float]] = {name: [] for name in worlds}
    names = list(worlds)
    for number in range(blocks + 1):
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            seconds = worlds[name].steps(STEPS)
            if number:  # the first block warms up
                times[name].append(1000 * seconds / STEPS)
    for world in worlds.values():
        world.end()
    return times


def rows_of_worlds(times: Mapping[str, Sequence[float]]) -> list[list[str]]:
    def ratio(above: Sequence[float], below: Sequence[float]) -> list[float]:
        return [a / b for a, b in zip(above, below, strict=True)]

    efficiencies = ratio(times["one"], times["two"])
    bound_efficiencies = ratio(times["plain one"], times["plain two"])
    of_bound = interval(ratio(efficiencies, bound_efficiencies))
    is_reached = of_bound[0] >= WANTED_OF_BOUND
    return [
        ["step of one worker on one core, ms", spread(times["one"]), "", ""],
        ["step of two workers on two cores, ms", spread(times["two"]), "", ""],
        ["two once more : two (A/A)", spread(ratio(times["again"], times["two"]), 3), "", ""],
        ["step of one plain process, ms", spread(times["plain one"]), "", ""],
        ["step of two plain processes, no exchange, ms", spread(times["plain two"]), "", ""],
        ["efficiency of two workers", spread(efficiencies, 3), "", ""],
        ["efficiency of two plain processes: the bound", spread(bound_efficiencies, 3), "", ""],
        ["efficiency : bound [95 %]", f"{of_bound[0]:.3f} [{of_bound[1]:.3f}, {of_bound[2]:.3f}]",
         f">= {WANTED_OF_BOUND}", "yes" if is_reached else "no"],
    ]  # fmt: skip


# -- 2. the store's load ---------------------------------------------------------------------------


class MeasuredLocalEngine(LocalEngine):
    """The local engine; records how much memory of its store was touched."""

    used_bytes = 0

    def close(self) -> None:
        if not self._is_closed:
            MeasuredLocalEngine.used_bytes = self._arena.used_bytes()
        super().close()


def measure_load(workers: int, updates: int) -> tuple[float, float]:
    """Return the link's seconds for one push of each worker, and store memory over parameters."""
    program = ScriptProgram(path=str(Path(pushes.__file__).resolve()), args=("--worker",))
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        settings = RunSettings(
            workers=workers, protocol="async", path="store", threads=1, updates=updates,
            checkpoint_every="never", run_dir=str(run_dir),
        )  # fmt: skip
        host = Host(make=lambda name, number: MeasuredLocalEngine(number))
        launch_run(program, settings, QuietObserver(), host)
        times_s = update_times_s(records_of(run_dir))
    skipped = max(len(times_s) // 4, 2 * workers)  # until every worker has begun
    push_s = (times_s[-1] - times_s[skipped]) / (len(times_s) - 1 - skipped)
    layout = lay_out(build_lenet("default").named_parameters(), (), ())
    slots = arena_bytes(layout, workers) - arena_bytes(layout, 0)
    beyond = MeasuredLocalEngine.used_bytes - slots
    return workers * push_s, beyond / layout.parameters.num_bytes


def rows_of_load(load: Mapping[int, Sequence[tuple[float, float]]]) -> list[list[str]]:
    rows = []
    for workers, runs in load.items():
        memory = max(ratio for _, ratio in runs)
        rows.append([
            str(workers), spread([1e6 * link_s / workers for link_s, _ in runs], 0),
            spread([1e3 * link_s for link_s, _ in runs]), f"{memory:.3f}", f"<= {WANTED_MEMORY:g}",
            "yes" if memory <= WANTED_MEMORY else "no",
        ])  # fmt: skip
    return rows


# -- 3. shards -------------------------------------------------------------------------------------


def shard_times_s(keys: Mapping[str, Tensor], num_shards: int, count: int) -> list[float]:
    """Return how long each shard is held while every key is pushed once."""
    with KVStore(num_shards=num_shards) as store:
        store.init(dict(keys))
        entries = store._entries
        times_s = [0.0] * num_shards
        for name, value in keys.items():
            durations_s = []
            for _ in range(count):
                start_s = perf_counter()
                store.push(name, value)
                durations_s.append(perf_counter() - start_s)
            times_s[entries.find(name).record.shard] += statistics.median(durations_s)
    return times_s


def measure_shards(
    keys: Mapping[str, Tensor], rounds: int, count: int
) -> dict[int, list[list[float]]]:
    times: dict[int, list[list[float]]] = {number: [] for number in SHARDS}
    for turn in range(rounds):
        first = turn % len(SHARDS)
        for number in (*SHARDS[first:], *SHARDS[:first]):
            times[number].append(shard_times_s(keys, number, count))
    return times


def division_ratios(times: Mapping[int, Sequence[Sequence[float]]], number: int) -> list[float]:
    """Return the fullest shard's time over its part of one shard's time, by round; 1 is ideal."""
    return [
        number * max(times_s) / alone_s[0]
        for times_s, alone_s in zip(times[number], times[1], strict=True)
    ]


def rows_of_shards(name: str, times: Mapping[int, Sequence[Sequence[float]]]) -> list[list[str]]:
    rows = []
    for number in SHARDS:
        median_ratio = statistics.median(division_ratios(times, number))
        is_reached = median_ratio <= 1 + WANTED_SHARE
        rows.append([
            name, str(number), spread([1e3 * max(times_s) for times_s in times[number]]),
            spread(division_ratios(times, number)), f"<= {1 + WANTED_SHARE:g}",
            "yes" if is_reached else "no",
        ])  # fmt: skip
    return rows


# -- the page --------------------------------------------------------------------------------------


def draw(
    load: Mapping[int, Sequence[tuple[float, float]]],
    shards: Mapping[str, Mapping[int, Sequence[Sequence[float]]]],
) -> str:
    def points(values: Mapping[int, float]) -> tuple[Point, ...]:
        return tuple(Point(t=float(x), value=value) for x, value in values.items())

    link = points({n: 1e3 * statistics.median(s for s, _ in runs) for n, runs in load.items()})
    memory = points({n: max(ratio for _, ratio in runs) for n, runs in load.items()})
    fullest = [
        Curve(name=name, points=(line := points(
            {n: 1e3 * statistics.median(max(times_s) for times_s in times[n]) for n in SHARDS}
        )), dots=line)
        for name, times in shards.items()
    ]  # fmt: skip
    alone_ms = fullest[0].points[0].value
    ideal = Curve(
        name="one shard's time, divided", points=points({n: alone_ms / n for n in SHARDS})
    )
    return draw_chart(
        "The store's load",
        "LeNet's parameters; workers that only push; key-value store by shards",
        [
            Diagram(label="the link's time for one push of each worker, ms", from_zero=True,
                    curves=(Curve(name="async, path store", points=link, dots=link),),
                    height=180.0),
            Diagram(label="memory beyond the workers' slots, times the parameters", from_zero=True,
                    curves=(Curve(name="async, path store", points=memory, dots=memory),),
                    mark=(WANTED_MEMORY, "wanted: at most"), x_label="workers", height=140.0),
            Diagram(label="time that the fullest shard is held for every key once, ms",
                    from_zero=True, curves=(*fullest, ideal), x_label="shards", height=180.0),
        ],
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--blocks", type=int, default=9)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    note, quick = machine(), options.quick
    second = rows_of_worlds(measure_worlds(2 if quick else options.blocks))
    _print(second)
    load: dict[int, list[tuple[float, float]]] = {workers: [] for workers in WORKERS}
    for _ in range(1 if quick else 3):
        for workers in WORKERS:
            load[workers].append(measure_load(workers, UPDATES // 4 if quick else UPDATES))
    _print(rows_of_load(load))
    lenet = {name: value.detach() for name, value in build_lenet("default").named_parameters()}
    subjects = {"24 equal keys": EQUAL_KEYS, "LeNet": lenet}
    rounds, count = (2, 20) if quick else (9, 200)
    shards = {name: measure_shards(keys, rounds, count) for name, keys in subjects.items()}
    shard_rows = [row for name, times in shards.items() for row in rows_of_shards(name, times)]
    _print(shard_rows)
    if options.write:
        _write(second, rows_of_load(load), shard_rows, note, draw(load, shards))


def _print(rows: Sequence[Sequence[str]]) -> None:
    for row in rows:
        print(" | ".join(row), flush=True)


def _write(
    second: Sequence[Sequence[str]], load: Sequence[Sequence[str]],
    shards: Sequence[Sequence[str]], note: str, picture: str,
) -> None:  # fmt: skip
    (RESULTS / "scaling.svg").write_text(picture)
    load_header = [
        "workers", "the link's time a push, us", "for one push of each, ms",
        "memory beyond the slots, times the parameters", "wanted", "reached",
    ]  # fmt: skip
    shard_header = [
        "keys", "shards", "held for every key once, ms: the fullest shard",
        "that : its part of one shard's", "wanted", "reached",
    ]  # fmt: skip
    text = "\n".join([
        f"LeNet, mini-batch {MINI_BATCH} each, one thread each; blocks of {STEPS} steps in turn; "
        "median (least to most).", "", "## The store's load", "",
        "Real processes push a ready gradient of LeNet under async, with a step that costs "
        "nothing; three runs of each. Who pushes writes into the store by itself: there is no "
        "server that a hundred could wait for.", "", *_table(load_header, load), "", "## Shards",
        "", "The parameters of a run lie in one piece, without shards; `paceline.KVStore` has "
        "them. A key lies on one shard as a whole, so a model with one large key is not divided.",
        "", *_table(shard_header, shards), "", "![the store's load](scaling.svg)", "", note,
    ])  # fmt: skip
    write_table(
        "scaling", "Scaling over workers", ["what", "measured", "wanted", "reached"], second, text
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
