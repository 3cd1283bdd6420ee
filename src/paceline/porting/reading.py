"""Reads what a script does from its text, before every run; the script is never run here.

    Source            what its names mean, its calls, the function that a node is in
    note_of_writes    torch.save(...), open(..., "w"), mkdir, download=True, without an
                      if pace.is_main: around them: what all workers would write to the same files
                      at the same time
    files_of          the files of the script's folder that it imports

What the user's other modules write is not seen. Above 300 lines, since all of it reads one kind of
tree. This module must not know what its results are used for.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

WRAP = "parallel.DistributedDataParallel"
INIT = "distributed.init_process_group"
_SAVES = (
    "torch.save", "numpy.save", "numpy.savez", "numpy.savez_compressed", "numpy.savetxt",
    "joblib.dump", "safetensors.torch.save_file", "write_text", "write_bytes", "to_csv",
    "to_parquet", "to_pickle", "savefig", "save_image", "save_pretrained", "SummaryWriter",
    "shutil.rmtree", "shutil.copy", "shutil.copy2", "shutil.copyfile", "shutil.copytree",
    "shutil.move", "os.rename", "os.replace", "os.remove", "os.unlink",
)  # fmt: skip
"""Endings of the names of functions that write, copy or remove files."""
_FOLDERS = ("os.mkdir", "os.makedirs", "mkdir")
"""Functions that fail if another worker was faster, unless ``exist_ok=True``."""
_GUARD = re.compile(
    r"is_main|is_first|main_process|is_master|master_process|\.once\(|"
    r"(rank|worker|gpu_id)\w*(\(\))? *(% *[\w.]+ *)?== *0|not (\w+\.)*(local_|global_)?rank\b"
)
_OTHERS_TEST = re.compile(
    r"not \(?[\w.]*(is_main|is_first|main_process|master)|rank\w*(\(\))? *(!=|>) *0"
)
_OF_ONE_WORKER = re.compile(
    r"_?((local|global|world|node|my|this|proc|process|dist|ddp|cur|current)_)?"
    r"(rank|worker|gpu)(_?(id|num|number|name|index|idx|dir|folder|path|file|info))?"
    r"|get(_\w+)?_rank|getpid|tempfile|\w*mkd?s?temp|tmp_path|devnull|dup2?|fdopen"
    r"|NamedTemporaryFile|TemporaryDirectory"
)
"""Names in a path which show that the path belongs to one worker."""
_TEMPORARY = re.compile(r"tempfile|\w*mkd?s?temp|NamedTemporaryFile|TemporaryDirectory")
"""Of these, names of what each worker makes for itself, under whatever name it is kept."""
_LOADS = (
    "torch.load", "torch.jit.load", "numpy.load", "joblib.load", "load_file", "read_csv",
    "read_parquet", "read_pickle",
)  # fmt: skip
"""Endings of the names of functions that read a whole file."""
_MOST_FILES = 40
"""Files of a script's folder that are read: more than the training part of a project has."""
_MOST_LISTED, _MOST_STEPS = 3, 4
"""Writes that a note lists; assignments from a temporary folder to the path of a file in it."""
Scope: TypeAlias = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef


class Source:
    """A script's text with its syntax tree.

    Raises:
        SyntaxError: the text is not Python.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.tree = ast.parse(text)
        self.lines = text.splitlines(keepends=True)
        self._parents = {
            child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)
        }
        self._names = dict(_imported(self.tree))

    def meaning(self, node: ast.AST) -> str:
        """Return the full dotted name that an expression stands for: ``torch.distributed.barrier``.

        A name that was not imported stands for itself; other expressions give an empty text.
        """
        if isinstance(node, ast.Name):
            return self._names.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            owner = self.meaning(node.value)
            return f"{owner}.{node.attr}" if owner else ""
        return ""

    def imports(self, *packages: str) -> str:
        """Return the first of these packages that the script imports from; empty if it is none."""
        imported = {name.partition(".")[0] for name in self._names.values()}
        return next((package for package in packages if package in imported), "")

    def calls(self, *endings: str) -> Iterator[ast.Call]:
        """Yield calls whose full dotted names end with one of these, in the order of the text."""
        calls = [
            node
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Call)
            and any(f".{self.meaning(node.func)}".endswith(f".{ending}") for ending in endings)
        ]
        return iter(sorted(calls, key=lambda node: (node.lineno, node.col_offset)))

    def parent(self, node: ast.AST) -> ast.AST:
        """Return the parent of a node."""
        return self._parents.get(node, self.tree)

    def scope(self, node: ast.AST) -> Scope:
        """Return the function or the module that ``node`` is in."""
        while True:
            node = self.parent(node)
            if isinstance(node, Scope):
                return node

    def code(self, node: ast.expr) -> str:
        """Return the text of a node; the tree counts columns in bytes of UTF-8."""
        rows = [line.encode() for line in self.lines[node.lineno - 1 : node.end_lineno]]
        rows[-1] = rows[-1][: node.end_col_offset]
        rows[0] = rows[0][node.col_offset :]
        return b"".join(rows).decode()


def _imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield each imported name with the full name that it stands for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname:
                    yield alias.asname, alias.name
                else:
                    yield alias.name.partition(".")[0], alias.name.partition(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def files_of(script: Path) -> Iterator[tuple[Path, str]]:
    """Yield the files of a script's folder, or below it, that it imports, itself or through others.

    Those that cannot be read, are not Python or begin with a byte order mark are left out.
    """
    script = script.resolve()
    pending, seen = [script], {script}
    for path in pending:
        try:
            text = path.read_bytes().decode("utf-8")  # with its own line endings, for a diff
            tree = ast.parse(text)
        except (OSError, SyntaxError, ValueError):
            continue
        if path != script:
            yield path, text
        for further in _imported_files(path, tree, script.parent):
            if further not in seen and len(seen) < _MOST_FILES:
                seen.add(further)
                pending.append(further)


def _imported_files(path: Path, tree: ast.Module, folder: Path) -> Iterator[Path]:
    """Yield the files below a folder that a file imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [(folder, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level <= len(path.parents):
            start = path.parents[node.level - 1] if node.level else folder
            module = node.module or ""
            names = [(start, module)]
            names += [(start, f"{module}.{alias.name}".strip(".")) for alias in node.names]
        else:
            continue
        for start, name in names:
            place = start.joinpath(*name.split(".")) if name else start
            for found in (place.with_suffix(".py"), place / "__init__.py"):
                if found.is_file() and found.resolve().is_relative_to(folder):
                    yield found.resolve()


def note_of_writes(source: Source, name: str) -> str:
    """Return one sentence on what all workers would write at once; empty if there is nothing."""
    all_writes = sorted({(line, text) for line, _, text in writes(source)})
    if not all_writes:
        return ""
    listed = [f"{name}:{line} {text}" for line, text in all_writes[:_MOST_LISTED]]
    if len(all_writes) > _MOST_LISTED:
        listed.append(f"{len(all_writes) - _MOST_LISTED} more")
    start = ", ".join(listed[:-1])
    return (
        f"{start}{' and ' if start else ''}{listed[-1]} {'run' if start else 'runs'} in every "
        "worker, on the same files: put it under if pace.is_main:, or under with pace.once(): if "
        "the others must wait for it"
    )


def writes(source: Source) -> Iterator[tuple[int, str, str]]:
    """Yield what all workers would write at once: line, function, and its name for the user."""
    for call in (node for node in ast.walk(source.tree) if isinstance(node, ast.Call)):
        text = _written(source, call)
        if text and not _is_of_one_worker(source, call) and not _is_guarded(source, call):
            yield call.lineno, source.code(call.func), text


def rereads(source: Source) -> Iterator[tuple[int, str]]:
    """Yield what all workers would read of a file that is written above: line and function."""
    written = [
        (call.lineno, part)
        for call in (node for node in ast.walk(source.tree) if isinstance(node, ast.Call))
        if _is_save(source, call) and not _is_guarded(source, call)
        for part in (*call.args, *_values(call))
    ]
    for call in source.calls(*_LOADS):
        if not call.args or _is_guarded(source, call):
            continue
        if any(
            line < call.lineno and _may_be(source, part, call.args[0]) for line, part in written
        ):
            yield call.lineno, source.code(call.func)


def _may_be(source: Source, written: ast.expr, read: ast.expr) -> bool:
    """Whether two paths may be one: of the same text, or one a name and one ``"best.pt"``."""
    if source.code(written) == source.code(read):
        return True
    is_text = [
        isinstance(path, ast.Constant) and isinstance(path.value, str) for path in (written, read)
    ]
    is_name = [isinstance(path, ast.Name | ast.Attribute) for path in (written, read)]
    return any(is_text) and any(is_name)


def _values(call: ast.Call) -> Iterator[ast.expr]:
    return (word.value for word in call.keywords)


def _is_save(source: Source, call: ast.Call) -> bool:
    """Whether a call writes a file that all workers share."""
    return bool(_written(source, call)) and not _is_of_one_worker(source, call)


def _written(source: Source, call: ast.Call) -> str:
    """Return how a call that writes is shown to the user; empty if it writes nothing."""
    meaning = f".{source.meaning(call.func)}"
    if meaning == "." and isinstance(call.func, ast.Attribute):
        meaning = f".{call.func.attr}"  # of an expression: Path(...).write_text
    name = source.code(call.func) if len(source.code(call.func)) < 40 else meaning[1:]
    keywords = {word.arg: source.code(word.value) for word in call.keywords}
    if any(meaning.endswith(f".{ending}") for ending in _SAVES):
        return f"{name}(...)"
    if any(meaning.endswith(f".{ending}") for ending in _FOLDERS):
        return f"{name}(...)" if keywords.get("exist_ok") != "True" else ""
    if meaning in (".open", ".io.open") or meaning.endswith((".open", ".fdopen")):
        index = 0 if isinstance(call.func, ast.Attribute) and meaning != ".io.open" else 1
        argument = source.code(call.args[index]) if len(call.args) > index else ""
        mode = keywords.get("mode", argument)
        is_mode = re.fullmatch(r"""['"][rbt+]*[wax][wabtx+]*['"]""", mode) is not None
        return f"{name}(..., {mode})" if is_mode else ""
    return f"{name}(..., download=True)" if keywords.get("download") == "True" else ""


def _is_of_one_worker(source: Source, call: ast.Call) -> bool:
    """Whether a call's path belongs to one worker."""
    names = set(_names_in(call))
    return any(map(_OF_ONE_WORKER.fullmatch, names)) or not names.isdisjoint(_temporary(source))


def _names_in(node: ast.AST) -> Iterator[str]:
    return (getattr(part, "id", getattr(part, "attr", "")) for part in ast.walk(node))


def _temporary(source: Source) -> set[str]:
    """Return the names of temporary files and folders, and of paths that are made of them."""
    bound: list[tuple[ast.AST, ast.AST]] = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Assign):
            bound += [(target, node.value) for target in node.targets]
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            bound.append((node.optional_vars, node.context_expr))
    found: set[str] = set()
    for _ in range(_MOST_STEPS):
        for target, value in bound:
            names = set(_names_in(value))
            if any(map(_TEMPORARY.fullmatch, names)) or not names.isdisjoint(found):
                found |= {target.id} if isinstance(target, ast.Name) else set()
    return found


def _is_guarded(source: Source, node: ast.AST, depth: int = 0) -> bool:
    """Whether only one worker reaches a node, or one after another."""
    scope = source.scope(node)
    child = node
    while child is not scope:
        parent = source.parent(child)
        if isinstance(parent, ast.If) and child in parent.body:
            test = source.code(parent.test)
            if _GUARD.search(test) and not _OTHERS_TEST.search(test):
                return True
        elif isinstance(parent, ast.If) and child in parent.orelse:
            if _OTHERS_TEST.search(source.code(parent.test)):
                return True
        elif isinstance(parent, ast.With) and any(
            _GUARD.search(source.code(item.context_expr)) for item in parent.items
        ):
            return True
        child = parent
    if isinstance(scope, ast.Module) or depth > 4:
        return False
    if any(
        _ends_for_others(source, statement)
        for statement in scope.body
        if statement.lineno < _line(node)
    ):
        return True
    calls = [call for call in source.calls(scope.name) if not _written(source, call)]
    return bool(calls) and all(_is_guarded(source, call, depth + 1) for call in calls)


def _ends_for_others(source: Source, statement: ast.stmt) -> bool:
    """Whether this ends the function for other workers: ``if not pace.is_main: return``."""
    return (
        isinstance(statement, ast.If)
        and isinstance(statement.body[-1], ast.Return | ast.Raise)
        and _OTHERS_TEST.search(source.code(statement.test)) is not None
    )


def _line(node: ast.AST) -> int:
    line: int = getattr(node, "lineno", 0)
    return line
