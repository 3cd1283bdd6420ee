"""Rules that keep the code readable: short files and functions, tests for each module.

The tables list the exceptions, each with its reason; an outdated exception fails, too.
"""

import ast
import functools
import re
import statistics
from collections.abc import Iterator
from pathlib import Path

from test_layers import FILES, ROOT, module_of, tree_of

TESTS = Path(__file__).parent
MOST_LINES, MOST_FUNCTION_LINES, MOST_LINES_OF_NINE_IN_TEN = 300, 40, 20
MOST_FILES, MOST_FILES_OF_A_FOLDER, MOST_FILES_ON_TOP = 642, 24, 16
"""Of all files, 166 are the doctor's: one for each of its rules, and one for each group. The entry
point of scripts is three: ``worker``, ``participant`` and ``trials``."""

LONG_FUNCTIONS = {
    "store.optimizer.Updater.__init__": "the state of every kind of optimizer, laid out",
    "report.summary._summary": "one field a line",
    "run.describe.Description.header": "one field a line",
    "run.describe.make_plan": "one field a line",
    "launch.launcher._run": "what a life opens, in the order in which it is closed again",
    "run.controller.Controller.__init__": "every part of a run, made and joined in one place",
    "run.controller.Controller._make_table": "a line for each message",
}
"""Functions above 40 lines without their docstring, and why."""

FAMILIES = {
    "engines": ("engines", "contracts", "wire"),
    "exchange": ("exchange", "contracts", "script"),
    "replica": ("replica", "script"),
    "system": ("system", "faults"),
}
"""Test folders of a package folder, if not only the one of the same name."""

DRIVEN = {
    "cli": "a command runs as one: tests/cli say its line to cli.app, which finds its file",
    "run": "events go in and messages come out on paper: tests/run, through run.controller",
    "protocols": "a protocol is reached by its name: tests/protocols, through protocols.parse",
    "collectives": "a schedule is reached by its name: tests/collectives, by collectives.parse",
    "compression": "a compressor is reached by its name: tests/compression, by compression.parse",
    "engines": "members are run: tests/contracts and tests/engines, by an engine's name",
    "doctor": "a rule is reached by its name: tests/doctor, through doctor.catalogue",
    "lightning": "a Trainer drives it: tests/frameworks, by paceline.lightning.PacelineStrategy",
}
"""Folders whose modules are used through one entry point, and how."""

ELSEWHERE: dict[str, str] = {
    "data.positions": "where a sampler's batches end: tests/data draw them through EpochOrder",
    "exchange.unedited": "edited weights, driven through StoreExchange in tests/exchange",
    "exchange.peers": "rounds, driven through StoreExchange in tests/exchange",
    "kvstore.kvstore": "tests/kvstore use it by its public name, paceline.KVStore",
    "porting.endless": "a kind of loop: scripts of tests/porting/plain, through porting.check",
    "porting.indexed": "a kind of loop: scripts of tests/porting/plain, through porting.check",
    "porting.together": "what loops count on: scripts of tests/porting/plain, the same way",
    "script.source": "what an epoch consists of: tests/script find it out by pace.prepare",
    "trace.reader": "tests/trace read through paceline.trace",
}
"""Modules that no test of their family imports, and what tests them."""

MAY_HOLD_ANYTHING = {
    "state", "load", "resume", "resting_state", "from_state", "remember", "go_on", "marks", "mark",
    "write", "read", "header", "identity", "json", "random_states", "restore_random_states",
    "groups_of", "set_groups", "read_state", "make_twin", "optimizer_state", "load_state_dict",
    "state_for", "append", "sort_out", "work", "read_ceilings",
}  # fmt: skip
"""Functions that read or write a format, or take objects of torch or the user."""


PASSED_OVER = re.compile(
    r"#\s*(?:type:\s*ignore(?:\[[^\]]*\])?|noqa(?::\s*[A-Z]+\d+(?:,\s*[A-Z]+\d+)*)?)(?P<why>.*)$"
)
CATCHES_ALL = re.compile(r"^\s*except( \(?(Base)?Exception\)?( as \w+)?)?:(?P<why>.*)$")


def functions(path: Path) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Each function of a file, with its qualified name."""

    def below(node: ast.AST, name: str) -> Iterator[tuple[str, ast.FunctionDef]]:
        for inner in ast.iter_child_nodes(node):
            if isinstance(inner, ast.FunctionDef):
                yield f"{name}.{inner.name}", inner
            if isinstance(inner, ast.FunctionDef | ast.ClassDef):
                yield from below(inner, f"{name}.{inner.name}")
            elif not isinstance(inner, ast.expr):
                yield from below(inner, name)

    yield from below(tree_of(path), module_of(path))


def code_lines(function: ast.FunctionDef) -> int:
    """The number of its lines without the docstring."""
    first, end = function.body[0], function.end_lineno
    assert end is not None
    doc_lines = 0
    if ast.get_docstring(function) is not None and first.end_lineno is not None:
        doc_lines = first.end_lineno - first.lineno + 1
    return end - function.lineno + 1 - doc_lines


def test_long_file_says_why() -> None:
    long = [path for path in FILES if path.read_text().count("\n") > MOST_LINES]
    silent = [
        module_of(path)
        for path in long
        if f"{MOST_LINES} lines" not in (ast.get_docstring(tree_of(path)) or "")
    ]
    assert silent == []


def _unreasoned(pattern: re.Pattern[str]) -> list[str]:
    """Lines of the package, bench/ and paper/ that match and have no reason after them."""
    places = [
        *FILES,
        *ROOT.parent.parent.glob("bench/*.py"),
        *ROOT.parent.parent.glob("paper/*.py"),
    ]
    return [
        f"{path.name}:{number}"
        for path in places
        for number, row in enumerate(path.read_text().splitlines(), 1)
        if (result := pattern.search(row)) and not re.search(r"\w", result["why"])
    ]


def test_ignored_checker_findings_have_a_reason() -> None:
    assert _unreasoned(PASSED_OVER) == []


def test_broad_excepts_have_a_reason() -> None:
    assert _unreasoned(CATCHES_ALL) == []


def test_functions_are_short() -> None:
    lines = {name: code_lines(node) for path in FILES for name, node in functions(path)}
    long = {name for name, count in lines.items() if count > MOST_FUNCTION_LINES}
    assert long == LONG_FUNCTIONS.keys()
    assert statistics.quantiles(lines.values(), n=10)[-1] <= MOST_LINES_OF_NINE_IN_TEN


def test_number_of_files_is_limited() -> None:
    folders = [folder for folder in (ROOT, *ROOT.rglob("*")) if (folder / "__init__.py").is_file()]
    counts = {folder: len(list(folder.glob("*.py"))) for folder in folders}
    assert sum(counts.values()) <= MOST_FILES
    assert counts.pop(ROOT) <= MOST_FILES_ON_TOP
    assert max(counts.values()) <= MOST_FILES_OF_A_FOLDER


@functools.cache
def imported(path: Path) -> frozenset[str]:
    """The modules a test imports from the package, or names as ``paceline.module:name``."""
    return frozenset(_imported(path))


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(tree_of(path)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value.partition(":")[0]]
        yield from (name.removeprefix("paceline.") for name in names)


def test_every_module_is_imported_by_a_test_of_its_family() -> None:
    there = {module_of(path) for path in FILES if not path.stem.startswith("__")}
    untested = set()
    for module in there:
        folder, _, rest = module.partition(".")
        if not rest:
            tests = list(TESTS.rglob("*.py"))
        else:
            families = FAMILIES.get(folder, (folder,))
            tests = [path for family in families for path in (TESTS / family).rglob("*.py")]
        if not any(module in imported(path) for path in tests):
            untested.add(module)
    for folder in DRIVEN:
        inside = {module for module in there if module.startswith(f"{folder}.")}
        assert inside & untested, f"the reason for {folder} is out of date"
        untested -= inside
    assert untested == ELSEWHERE.keys()


def test_only_formats_use_untyped_values() -> None:
    """Between modules, values have types and names."""
    for path in FILES:
        for name, node in functions(path):
            own = name.rpartition(".")[2]
            if own.startswith("_") or own in MAY_HOLD_ANYTHING:
                continue
            arguments = [*node.args.args, *node.args.kwonlyargs]
            kinds = [argument.annotation for argument in arguments] + [node.returns]
            words = " ".join(ast.unparse(kind) for kind in kinds if kind is not None)
            assert "dict[str, Any]" not in words, name
            assert "tuple[Any" not in words, name


def test_module_level_names_are_assigned_once() -> None:
    """A second assignment would silently replace the first."""
    for path in FILES:
        names = [
            target.id
            for node in tree_of(path).body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        ]
        assert sorted(set(names)) == sorted(names), path
