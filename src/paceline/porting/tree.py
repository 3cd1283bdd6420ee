"""A script's syntax tree, which answers what names mean, and edits of single nodes.

    text -> libcst -> SourceTree -> a pass fills TreeEdits -> the text, otherwise unchanged

The tree keeps comments and layout, so that a diff shows only the intended changes. Above 300 lines,
since the edits need to know the tree's layout. This module must not know what is edited or why.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider

_NAMING = {
    cst.Attribute: "attr", cst.Arg: "keyword", cst.Param: "name", cst.FunctionDef: "name",
    cst.ClassDef: "name",
}  # fmt: skip
"""The fields in which nodes have names that are not expressions."""
Scope: TypeAlias = cst.Module | cst.FunctionDef
Block: TypeAlias = cst.Module | cst.IndentedBlock
Statement: TypeAlias = cst.BaseSmallStatement | cst.BaseCompoundStatement


class CannotDerive(Exception):
    """The script is written in a way that this package cannot follow.

    Args:
        why: a sentence for the user, with line numbers; empty if there is none to say.
    """

    def __init__(self, why: str = "") -> None:
        super().__init__(why)
        self.why = why


class Binding(NamedTuple):
    """One target of an assignment.

    Attributes:
        name: its text: ``model``, ``self.model``.
        value: what is assigned to it; for ``a, b = f()`` the value of all targets together.
        place: its index among the targets that share a value; None if it has its own.
        node: the assignment.
    """

    name: str
    value: cst.BaseExpression
    place: int | None
    node: Statement


def border(module: str) -> str:
    """Return the line that stands in one text between a script and the file of a module."""
    return f"# ---- paceline: the file of {module} begins here ----"


_BORDER = re.compile(f"^{border('([^ ]+)')}$", re.MULTILINE)


class SourceTree:
    """The syntax tree of a text.

    Attributes:
        nodes: all nodes in the order of the text.
        parents: the parent of every node except the module.
        every_call: all calls.
        imports: all import statements.
        bindings: every target of every assignment.
        assigned: the value of every target that has its own, and the target's text.
        order: the position of each node in the text, from 0.
        beside: the module whose file follows the script's in this text; empty if none does.
    """

    def __init__(self, text: str) -> None:
        try:
            self.module = cst.parse_module(text)
        except cst.ParserSyntaxError:
            raise CannotDerive from None
        found = _BORDER.search(text)
        self.beside = found[1] if found else ""
        self._first_lines = text.count("\n", 0, found.start()) + 1 if found else math.inf
        self.parents: dict[cst.CSTNode, cst.CSTNode] = {}
        self.nodes = list(self._walk(self.module))
        self.every_call = [node for node in self.nodes if isinstance(node, cst.Call)]
        self.imports = [
            node for node in self.nodes if isinstance(node, cst.Import | cst.ImportFrom)
        ]
        self._names = {
            name: full
            for statement in self.imports
            for _, name, full in imported(statement)
            if isinstance(statement, cst.ImportFrom) or not full.startswith(f"{name}.")
        }
        self.order = {node: number for number, node in enumerate(self.nodes)}
        self.bindings = [binding for node in self.nodes for binding in self._bound(node)]
        self.assigned = [
            (binding.value, binding.name) for binding in self.bindings if binding.place is None
        ]

    def _bound(self, node: cst.CSTNode) -> Iterator[Binding]:
        """Yield the targets of an assignment."""
        targets: list[cst.BaseExpression] = []
        if isinstance(node, cst.Assign):
            targets = [target.target for target in node.targets]
        elif isinstance(node, cst.AnnAssign) and node.value is not None:
            targets = [node.target]
        value = getattr(node, "value", None)
        assert isinstance(node, Statement) or not targets
        for target in targets:
            if not isinstance(target, cst.Tuple | cst.List):
                yield Binding(self.code(target), value, None, node)  # type: ignore[arg-type]  # a statement that binds has a value
                continue
            values = value.elements if isinstance(value, cst.Tuple) else ()
            is_each = len(values) == len(target.elements)
            for place, element in enumerate(target.elements):
                part = values[place].value if is_each else value
                name = self.code(element.value)
                yield Binding(name, part, None if is_each else place, node)  # type: ignore[arg-type]  # a statement that binds has a value

    def _walk(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """Yield a node and its parts, except those of imports and names that are no expressions."""
        pending = [node]
        while pending:
            node = pending.pop()
            yield node
            name = getattr(node, _NAMING.get(type(node), ""), None)
            is_import = isinstance(node, cst.Import | cst.ImportFrom)
            parts = () if is_import else [child for child in node.children if child is not name]
            self.parents.update(dict.fromkeys(parts, node))
            pending += reversed(parts)

    def meaning(self, node: cst.CSTNode) -> str:
        """Return the full dotted name that an expression stands for: ``torch.distributed.barrier``.

        A name that was not imported stands for itself; other expressions give an empty text.
        """
        if isinstance(node, cst.Name):
            return self._names.get(node.value, node.value)
        if isinstance(node, cst.Attribute):
            owner = self.meaning(node.value)
            return f"{owner}.{node.attr.value}" if owner else ""
        return ""

    def calls(self, *endings: str) -> list[cst.Call]:
        """Return all calls whose full dotted names end with one of these."""
        dotted = tuple(f".{ending}" for ending in endings)
        return [call for call in self.every_call if f".{self.meaning(call.func)}".endswith(dotted)]

    def uses(self, name: str) -> list[cst.Name]:
        """Return all nodes in which a name is used as an expression."""
        return [node for node in self.nodes if isinstance(node, cst.Name) and node.value == name]

    def code(self, node: cst.CSTNode) -> str:
        """Return the text of a node."""
        return self.module.code_for_node(node)

    @cached_property
    def _positions(self) -> Any:
        wrapper = MetadataWrapper(self.module, unsafe_skip_copy=True)
        return wrapper.resolve(PositionProvider)

    def line(self, node: cst.CSTNode) -> int:
        """Return the number of the line in which a node begins, from 1."""
        number: int = self._positions[node].start.line
        return number

    def is_beside(self, node: cst.CSTNode) -> bool:
        """Whether a node is in the file that follows the script's in this text."""
        return bool(self.beside) and self.line(node) > self._first_lines

    def name_beside(self, node: cst.CSTNode) -> str:
        """Return the name in the file beside that an expression of the script means, or ""."""
        module, _, name = self.meaning(node).lstrip(".").rpartition(".")
        is_it = module and (module == self.beside or self.beside.startswith(f"{module}."))
        return name if is_it else ""

    def place(self, node: cst.CSTNode) -> tuple[int, int]:
        """Return the line and the column in which a node begins, from 1."""
        start = self._positions[node].start
        return start.line, start.column + 1

    def within(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """Yield a node and everything in it, in the order of the text."""
        return self._walk(node)

    def inside(self, node: cst.CSTNode) -> set[str]:
        """Return the text of every expression in a node, including itself."""
        return {
            self.code(part) for part in self._walk(node) if isinstance(part, cst.BaseExpression)
        }

    def block_line(self, node: cst.CSTNode) -> cst.CSTNode:
        """Return the innermost line or compound statement of a block that holds ``node``."""
        for parent in self.up(node):
            if isinstance(parent, Block):
                return node
            node = parent
        raise CannotDerive

    def up(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """Yield the ancestors of a node, up to its function or the module, which comes last."""
        while node is not self.module:
            node = self.parents[node]
            yield node
            if isinstance(node, cst.FunctionDef):
                return

    def scope(self, node: cst.CSTNode) -> Scope:
        """Return the function or the module that ``node`` is in."""
        *_, scope = self.up(node)
        assert isinstance(scope, Scope)
        return scope

    def statement(self, node: cst.CSTNode) -> Statement:
        """Return the smallest statement that holds ``node``."""
        return next(holder for holder in (node, *self.up(node)) if isinstance(holder, Statement))


def imported(node: cst.Import | cst.ImportFrom) -> list[tuple[cst.ImportAlias, str, str]]:
    """Return each alias of an import, its name in the script, and the full name it stands for."""
    prefix = ""
    if isinstance(node, cst.ImportFrom):
        module = cst.Module([]).code_for_node(node.module) if node.module else ""
        prefix = f"{'.' * len(node.relative)}{module}."
    names = []
    for alias in () if isinstance(node.names, cst.ImportStar) else node.names:
        name = alias.evaluated_alias or alias.evaluated_name.partition(".")[0]
        names.append((alias, name, prefix + alias.evaluated_name))
    return names


def positional(call: cst.Call) -> list[cst.BaseExpression]:
    """Return the positional arguments of a call."""
    return [
        argument.value for argument in call.args if argument.keyword is None and not argument.star
    ]


def by_name(call: cst.Call) -> dict[str, cst.BaseExpression]:
    """Return the keyword arguments of a call."""
    return {argument.keyword.value: argument.value for argument in call.args if argument.keyword}


class TreeEdits(cst.CSTTransformer):
    """Edits of a tree, which leave everything else as it is, comments and layout included."""

    def __init__(self) -> None:
        super().__init__()
        self._changes: dict[cst.CSTNode, Callable[[Any], Any]] = {}
        self._gone: set[cst.CSTNode] = set()
        self._before: dict[cst.CSTNode, list[str]] = {}
        self._after: dict[cst.CSTNode, str] = {}
        self._heads: dict[cst.CSTNode, str] = {}
        self._followers: dict[cst.CSTNode, cst.CSTNode] = {}

    def __bool__(self) -> bool:
        return any((self._changes, self._gone, self._before, self._after, self._heads))

    def change(self, node: cst.CSTNode, how: Callable[[Any], Any]) -> None:
        """Replace a node by ``how(node)``, called when the node's own parts are changed."""
        self._changes[node] = how

    def replace(self, node: cst.CSTNode, text: str) -> None:
        """Replace a node by the expression of a text."""
        self._changes[node] = lambda _: cst.parse_expression(text)

    def remove(self, node: cst.CSTNode) -> None:
        """Remove an element of a list; a block that becomes empty gets a ``pass``."""
        self._gone.add(node)

    def wrap(self, lines: Sequence[cst.CSTNode], header: str) -> None:
        """Indent neighbouring lines of a block under a header such as ``if pace.is_main:``.

        A header of several lines is one inside the other.
        """
        self._heads[lines[0]] = header
        self._followers.update(dict.fromkeys(lines[1:], lines[0]))

    def remove_calls(self, script: SourceTree, *endings: str) -> None:
        """Remove statements that only call one of these."""
        statements = [script.statement(call) for call in script.calls(*endings)]
        self._gone.update(statement for statement in statements if isinstance(statement, cst.Expr))

    def insert(self, line: cst.CSTNode, text: str, *, is_before: bool = False) -> None:
        """Insert a line after a line of a block, or before it, where several keep their order."""
        if is_before:
            self._before.setdefault(line, []).append(text)
        else:
            self._after[line] = text

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        if original_node in self._gone:
            return cst.RemoveFromParent()
        if isinstance(original_node, Block):
            updated_node = self._rebuilt(updated_node, original_node.body)
        for field in ("args", "names"):  # the new last element ends like the old one
            listed, remaining = getattr(original_node, field, ()), getattr(updated_node, field, ())
            if remaining and isinstance(listed, Sequence) and self._gone.issuperset(listed[-1:]):
                last = remaining[-1].with_changes(comma=listed[-1].comma)
                updated_node = updated_node.with_changes(**{field: [*remaining[:-1], last]})
        change = self._changes.get(original_node)
        return updated_node if change is None else change(updated_node)

    def _rebuilt(self, block: Any, before: Sequence[Any]) -> Any:
        """Return a block with its lines inserted and removed; comments above removed lines stay."""
        body: list[Any] = []
        comments: list[cst.EmptyLine] = []
        lines = iter(block.body)  # libcst has left out lines that have become empty
        for old in before:
            if old in self._gone:  # a compound statement, with the comments above it
                continue
            comments += old.leading_lines
            for text in self._before.get(old, ()):
                body.append(_line(text, comments))
                comments = []
            if not isinstance(old, cst.SimpleStatementLine) or not self._gone.issuperset(old.body):
                self._put(body, old, next(lines).with_changes(leading_lines=comments))
                comments = []
            if old in self._after:
                body.append(_line(self._after[old], comments))
                comments = []
        rest = {"footer": [*comments, *block.footer]} if comments else {}
        return block.with_changes(body=body, **rest)

    def _put(self, body: list[Any], old: cst.CSTNode, new: Any) -> None:
        """Append a line, under its header if it has one."""
        if old in self._followers:
            depth = self._heads[self._followers[old]].count("\n")
            body[-1] = _with_last(body[-1], new, depth)
        elif old in self._heads:
            head, comments = new.with_changes(leading_lines=()), new.leading_lines
            for text in reversed(self._heads[old].splitlines()):
                outer: Any = cst.parse_statement(f"{text.strip()}\n    pass\n")
                head = outer.with_changes(body=outer.body.with_changes(body=[head]))
            body.append(head.with_changes(leading_lines=comments))
        else:
            body.append(new)


def _with_last(block: Any, line: Any, depth: int) -> Any:
    """Return a compound statement with one more line, in the last block ``depth`` levels inside."""
    rows = list(block.body.body)
    rows = [*rows[:-1], _with_last(rows[-1], line, depth - 1)] if depth else [*rows, line]
    return block.with_changes(body=block.body.with_changes(body=rows))


def _line(text: str, comments: Sequence[cst.EmptyLine]) -> Any:
    line = cst.parse_statement(text)
    return line.with_changes(leading_lines=[*comments, *line.leading_lines])
