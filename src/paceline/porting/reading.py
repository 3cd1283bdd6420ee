"""What a script does, as its text says: it is read before every run, and never run here.

    Source            what its names mean, its calls, the function that something stands in
    note_of_writes    torch.save(...), open(..., "w"), mkdir, download=True, and no if pace.is_main:
                      around them: what all workers would write at the same time, on the same files

What another module of the user's writes is not seen. This module must not know who asked.
"""

import ast
import re
from collections.abc import Iterator
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
"""Endings of the names of what writes a file, copies one that was written, or takes it away."""
_FOLDERS = ("os.mkdir", "os.makedirs", "mkdir")
"""Fail where another worker was faster, unless ``exist_ok=True``."""
_GUARD = re.compile(
    r"is_main|is_first|main_process|is_master|master_process|\.once\(|"
    r"(rank|worker|gpu_id)\w*(\(\))? *(% *[\w.]+ *)?== *0|not (\w+\.)*(local_|global_)?rank\b"
)
_REFUSAL = re.compile(
    r"not \(?[\w.]*(is_main|is_first|main_process|master)|rank\w*(\(\))? *(!=|>) *0"
)
_OWN = re.compile(
    r"_?((local|global|world|node|my|this|proc|process|dist|ddp|cur|current)_)?"
    r"(rank|worker|gpu)(_?(id|num|number|name|index|idx|dir|folder|path|file|info))?"
    r"|get(_\w+)?_rank|getpid|tempfile|\w*mkd?s?temp|tmp_path|devnull|dup2?|fdopen"
    r"|NamedTemporaryFile|TemporaryDirectory"
)
"""A name in a path, by which it is this worker's own."""
_MOST = 3
Scope: TypeAlias = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef


class Source:
    """One text with its tree.

    Raises:
        SyntaxError: the text is no Python.
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
        """The full dotted name that an expression stands for: ``torch.distributed.barrier``.

        A name that was not imported stands for itself; what is no dotted name, for nothing.
        """
        if isinstance(node, ast.Name):
            return self._names.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            owner = self.meaning(node.value)
            return f"{owner}.{node.attr}" if owner else ""
        return ""

    def imports(self, *packages: str) -> str:
        """The first of these packages that something is imported from; empty: none is."""
        found = {name.partition(".")[0] for name in self._names.values()}
        return next((one for one in packages if one in found), "")

    def calls(self, *endings: str) -> Iterator[ast.Call]:
        """All calls of what ends with one of these dotted names, in the order of the text."""
        found = [
            node
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Call)
            and any(f".{self.meaning(node.func)}".endswith(f".{one}") for one in endings)
        ]
        return iter(sorted(found, key=lambda node: (node.lineno, node.col_offset)))

    def parent(self, node: ast.AST) -> ast.AST:
        return self._parents.get(node, self.tree)

    def scope(self, node: ast.AST) -> Scope:
        """The function, or the module, that ``node`` stands in."""
        while True:
            node = self.parent(node)
            if isinstance(node, Scope):
                return node

    def code(self, node: ast.expr) -> str:
        """The text of a node; the tree counts columns in bytes of UTF-8."""
        rows = [line.encode() for line in self.lines[node.lineno - 1 : node.end_lineno]]
        rows[-1] = rows[-1][: node.end_col_offset]
        rows[0] = rows[0][node.col_offset :]
        return b"".join(rows).decode()


def _imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Each imported name with the full name it stands for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                if one.asname:
                    yield one.asname, one.name
                else:
                    yield one.name.partition(".")[0], one.name.partition(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for one in node.names:
                yield one.asname or one.name, f"{node.module}.{one.name}"


def note_of_writes(source: Source, name: str) -> str:
    """One sentence on what is written by all workers at once; empty where nothing is."""
    found = sorted({(line, text) for line, _, text in writes(source)})
    if not found:
        return ""
    listed = [f"{name}:{line} {text}" for line, text in found[:_MOST]]
    if len(found) > _MOST:
        listed.append(f"{len(found) - _MOST} more")
    start = ", ".join(listed[:-1])
    return (
        f"{start}{' and ' if start else ''}{listed[-1]} {'run' if start else 'runs'} in every "
        "worker, on the same files: write it under if pace.is_main:, or under with pace.once(): "
        "where the others go on only after it"
    )


def writes(source: Source) -> Iterator[tuple[int, str, str]]:
    """What all workers would write at once: its line, the function's text, and how it is told."""
    for call in (one for one in ast.walk(source.tree) if isinstance(one, ast.Call)):
        text = _written(source, call)
        if text and not _is_own(source, call) and not _is_guarded(source, call):
            yield call.lineno, source.code(call.func), text


def _written(source: Source, call: ast.Call) -> str:
    """How a call that writes is named to the user; empty where it writes nothing."""
    meaning = f".{source.meaning(call.func)}"
    if meaning == "." and isinstance(call.func, ast.Attribute):
        meaning = f".{call.func.attr}"  # of an expression: Path(...).write_text
    short = source.code(call.func) if len(source.code(call.func)) < 40 else meaning[1:]
    words = {word.arg: source.code(word.value) for word in call.keywords}
    if any(meaning.endswith(f".{one}") for one in _SAVES):
        return f"{short}(...)"
    if any(meaning.endswith(f".{one}") for one in _FOLDERS):
        return f"{short}(...)" if words.get("exist_ok") != "True" else ""
    if meaning in (".open", ".io.open") or meaning.endswith((".open", ".fdopen")):
        place = 0 if isinstance(call.func, ast.Attribute) and meaning != ".io.open" else 1
        positional = source.code(call.args[place]) if len(call.args) > place else ""
        mode = words.get("mode", positional)
        is_mode = re.fullmatch(r"""['"][rbt+]*[wax][wabtx+]*['"]""", mode) is not None
        return f"{short}(..., {mode})" if is_mode else ""
    return f"{short}(..., download=True)" if words.get("download") == "True" else ""


def _is_own(source: Source, call: ast.Call) -> bool:
    """Whether its path says which worker's it is."""
    names = (getattr(one, "id", getattr(one, "attr", "")) for one in ast.walk(call))
    return any(map(_OWN.fullmatch, names))


def _is_guarded(source: Source, node: ast.AST, depth: int = 0) -> bool:
    """Whether one worker alone comes here, or one after the other."""
    scope = source.scope(node)
    one = node
    while one is not scope:
        parent = source.parent(one)
        if isinstance(parent, ast.If) and one in parent.body:
            test = source.code(parent.test)
            if _GUARD.search(test) and not _REFUSAL.search(test):
                return True
        elif isinstance(parent, ast.If) and one in parent.orelse:
            if _REFUSAL.search(source.code(parent.test)):
                return True
        elif isinstance(parent, ast.With) and any(
            _GUARD.search(source.code(item.context_expr)) for item in parent.items
        ):
            return True
        one = parent
    if isinstance(scope, ast.Module) or depth > 4:
        return False
    if any(_turns_away(source, before) for before in scope.body if before.lineno < _line(node)):
        return True
    calls = [one for one in source.calls(scope.name) if not _written(source, one)]
    return bool(calls) and all(_is_guarded(source, one, depth + 1) for one in calls)


def _turns_away(source: Source, statement: ast.stmt) -> bool:
    """``if not pace.is_main: return``"""
    return (
        isinstance(statement, ast.If)
        and isinstance(statement.body[-1], ast.Return | ast.Raise)
        and _REFUSAL.search(source.code(statement.test)) is not None
    )


def _line(node: ast.AST) -> int:
    line: int = getattr(node, "lineno", 0)
    return line
