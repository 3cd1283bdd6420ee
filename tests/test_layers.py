"""Imports point one way: from the tools down to the basic values, never back.

The table below is the architecture (docs/design.md, "Layout"): a module may import modules above
it in the table or in its own group, and none below.
"""

import ast
import functools
import importlib
import itertools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "src" / "paceline"

LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "events", "fields", "passes", "plan", "speed", "stopping"),
    ("system", "context", "config"),
    ("machine",),
    ("processes",),
    ("store",),
    ("replica", "run_dir"),
    ("kvstore", "data", "conditions", "protocols", "collectives", "compression", "wire"),
    ("partition",),
    ("core", "trace"),
    ("exchange", "checkpoints", "workloads", "report", "splits", "tuning", "theory"),
    ("spread",),
    ("script", "program"),
    ("trainer",),
    ("engines",),
    ("run", "simulation"),
    ("launch", "replay", "exports"),
    ("predict", "porting", "lightning", "verification"),
    ("bench", "doctor"),
    ("probe", "d2l"),
    ("cli", "__init__", "__main__"),
)
"""From the bottom up; the first part of a module's name decides. There is no cycle of folders."""

PURE = (
    "events", "errors", "core", "protocols", "collectives", "partition", "plan", "fields", "theory",
    "passes", "stopping", "trace.records", "wire.messages", "wire.codec", "processes.snapshot",
    "processes.judgement", "processes.targets", "machine.causes", "machine.causes_nvidia",
)  # fmt: skip
IMPURE = {"torch", "numpy", "time", "threading", "socket", "logging", "random", "multiprocessing"}

WORDS: dict[str, tuple[str, ...]] = {
    "messages": ("paceline.wire.messages",),
    "protocols": ("paceline.protocols",),
    "exchanges": ("paceline.exchange",),
    "engines": ("paceline.engines",),
    "the store": ("paceline.store",),
    "stores": ("paceline.store",),
    "jobs": ("paceline.core.jobs",),
    "leases": ("paceline.core.ledger",),
    "plans": ("paceline.plan",),
    "checkpoints": ("paceline.checkpoints",),
    "traces": ("paceline.trace",),
    "simulations": ("paceline.simulation",),
    "closures": ("paceline.script.closures",),
    "terminals": ("paceline.report.terminal", "paceline.report.screen", "rich"),
    "processes": ("subprocess", "multiprocessing", "psutil", "paceline.engines.local"),
    "sockets": ("socket",),
    "signals": ("signal",),
    "clocks": ("time",),
    "time": ("time",),
    "torch": ("torch",),
    "tensors": ("torch",),
}
"""Forbidden imports of a module that says, with one of these words, what it must not know. The
contract of a family, its ``base.py``, may be known by all."""

FILES = sorted(path for path in ROOT.rglob("*.py") if "__pycache__" not in path.parts)


def module_of(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")


def layer_of(part: str) -> int:
    for number, parts in enumerate(LAYERS):
        if part in parts:
            return number
    raise AssertionError(f"paceline.{part} stands in no layer: add it to the table of this file")


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """The syntax of a file, parsed once for all tests."""
    return ast.parse(path.read_text())


@functools.cache
def imports_of(path: Path) -> list[tuple[str, int]]:
    """Every paceline module that a file imports when it runs, with the line."""
    tree = tree_of(path)
    only_types = {
        node
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
        for node in ast.walk(block)
    }
    package = ["paceline", *path.relative_to(ROOT).parts[:-1]]
    results = []
    for node in ast.walk(tree):
        if node in only_types:
            continue
        if isinstance(node, ast.Import):
            results += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            results.append((name, node.lineno))
            if name == "paceline":
                results += [(f"paceline.{alias.name}", node.lineno) for alias in node.names]
    return [(name, line) for name, line in results if name.startswith("paceline.")]


def test_imports_point_down() -> None:
    upwards = []
    for path in FILES:
        here = module_of(path).split(".")[0]
        for name, line in imports_of(path):
            there = name.split(".")[1]
            if not (ROOT / there).is_dir() and not (ROOT / f"{there}.py").is_file():
                continue  # a name of the package itself: __version__
            if layer_of(there) > layer_of(here):
                upwards.append(f"{path}:{line} imports upwards: {name}")
    assert upwards == []


def test_pure_core_imports_no_tensors_processes_or_clocks() -> None:
    pure = [path for path in FILES if {module_of(path), module_of(path).split(".")[0]} & {*PURE}]
    assert pure
    impure = []
    for path in pure:
        for node in ast.walk(tree_of(path)):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            impure += [
                f"{path}:{node.lineno} imports {name}"
                for name in names
                if name.split(".")[0] in IMPURE
            ]
    assert impure == []


def unknown_to(path: Path) -> list[str]:
    """The words of the sentence in a module's docstring that says what it must not know."""
    doc = " ".join((ast.get_docstring(tree_of(path)) or "").split())
    result = re.search(r"must not know ([^.;:]*)", doc)
    return re.split(r",? (?:or|nor) |, ", result[1]) if result else []


@functools.cache
def all_imports_of(path: Path) -> list[str]:
    """All imports, ours and others, by their full names."""
    others = [
        name
        for node in ast.walk(tree_of(path))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom) and not node.level
            else []
        )
    ]
    return [*others, *(name for name, _ in imports_of(path))]


def test_module_respects_its_must_not_know_sentence() -> None:
    """The sentence of a folder's ``__init__`` applies to all its files."""
    known = []
    for path in FILES:
        words = [word for word in unknown_to(path) if word in WORDS]
        is_folder = path.name == "__init__.py" and words
        files = sorted(path.parent.rglob("*.py")) if is_folder else [path]
        for word, file in itertools.product(words, files):
            for name in all_imports_of(file):
                is_contract = f"{name}.".startswith(tuple(f"{part}.base." for part in WORDS[word]))
                is_known = f"{name}.".startswith(tuple(f"{part}." for part in WORDS[word]))
                if is_known and not is_contract:
                    known.append(f"{path} must not know {word}; {file} imports {name}")
    assert known == []


def test_must_not_know_sentences_are_found() -> None:
    results = [word for path in FILES for word in unknown_to(path) if word in WORDS]
    assert len(results) > 100  # fails if this test no longer finds them


def test_folders_have_no_import_cycles() -> None:
    """Including late imports, whatever the layers."""
    graph: dict[str, set[str]] = {}
    for path in FILES:
        here = module_of(path).split(".")[0]
        parts = {name.split(".")[1] for name, _ in imports_of(path)} - {here}
        graph.setdefault(here, set()).update(part for part in parts if (ROOT / part).is_dir())
    while leaves := {one for one, parts in graph.items() if not parts & graph.keys()}:
        graph = {one: parts for one, parts in graph.items() if one not in leaves}
    assert graph == {}


def test_class_names_are_unique() -> None:
    homes: dict[str, set[str]] = {}
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, set()).add(module_of(path))
    twice = {name: sorted(found) for name, found in homes.items() if len(found) > 1}
    assert twice == {}


def test_every_folder_docstring_lists_its_files() -> None:
    """The ``__init__`` of a folder describes each of its files."""
    for path in FILES:
        if path.name != "__init__.py" or path.parent == ROOT:
            continue
        text = path.read_text()
        missing = [one.stem for one in path.parent.glob("*.py") if one.stem not in text]
        assert missing in ([], ["__init__"]), f"{path} does not name {missing}"


def test_layer_table_matches_the_package() -> None:
    there = {module_of(path).split(".")[0] for path in FILES}
    assert {part for parts in LAYERS for part in parts} == there


@pytest.mark.parametrize("folder", ["bench", "docs", "examples", "paper"])
def test_names_imported_from_the_package_exist(folder: str) -> None:
    """No other test runs all of these files."""
    for path in (ROOT.parent.parent / folder).rglob("*.py"):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("paceline."):
                module = importlib.import_module(str(node.module))
                for name in node.names:
                    if not hasattr(module, name.name):
                        importlib.import_module(f"{module.__name__}.{name.name}")
