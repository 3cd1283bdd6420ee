"""A script as a tree that can be asked what its names mean, and edited where its nodes stand.

    text -> libcst -> SourceTree -> a pass fills TreeEdits -> the text again, else unchanged

The tree keeps comments and layout, so that a diff shows what was meant. This module must not know
what is edited or why.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider

_NAMING = {
    cst.Attribute: "attr", cst.Arg: "keyword", cst.Param: "name", cst.FunctionDef: "name",
    cst.ClassDef: "name",
}  # fmt: skip
"""Where a node has a name that is no expression."""
Scope: TypeAlias = cst.Module | cst.FunctionDef
Block: TypeAlias = cst.Module | cst.IndentedBlock
Statement: TypeAlias = cst.BaseSmallStatement | cst.BaseCompoundStatement


class CannotDerive(Exception):
    """The script is written in a way that is not followed.

    Args:
        why: a sentence for its user, with the numbers of lines; empty: nothing can be said.
    """

    def __init__(self, why: str = "") -> None:
        super().__init__(why)
        self.why = why


class Binding(NamedTuple):
    """One target of an assignment.

    Attributes:
        name: its text: ``model``, ``self.model``.
        value: what it gets, or where it is one of several (``a, b = f()``) what all of them get.
        place: which of several; None: it is the only one.
    """

    name: str
    value: cst.BaseExpression
    place: int | None
    node: Statement


class SourceTree:
    """One text with its tree; nodes in the order of the text.

    Attributes:
        parents: of every node but the module.
        bindings: every target of every assignment.
        assigned: the value of every assignment to one target, and the text of that.
        order: where each node stands in the text, from 0.
    """

    def __init__(self, text: str) -> None:
        try:
            self.module = cst.parse_module(text)
        except cst.ParserSyntaxError:
            raise CannotDerive from None
        self.parents: dict[cst.CSTNode, cst.CSTNode] = {}
        self.nodes = list(self._walk(self.module))
        self.every_call = [one for one in self.nodes if isinstance(one, cst.Call)]
        self.imports = [one for one in self.nodes if isinstance(one, cst.Import | cst.ImportFrom)]
        names = [pair for one in self.imports for pair in imported(one)]
        self._names = {name: full for _, name, full in names if not full.startswith(f"{name}.")}
        self.order = {node: number for number, node in enumerate(self.nodes)}
        self.bindings = [one for node in self.nodes for one in self._bound(node)]
        self.assigned = [(one.value, one.name) for one in self.bindings if one.place is None]

    def _bound(self, node: cst.CSTNode) -> Iterator[Binding]:
        """The targets of one assignment."""
        targets: list[cst.BaseExpression] = []
        if isinstance(node, cst.Assign):
            targets = [one.target for one in node.targets]
        elif isinstance(node, cst.AnnAssign) and node.value is not None:
            targets = [node.target]
        value = getattr(node, "value", None)
        assert isinstance(node, Statement) or not targets
        for target in targets:
            if not isinstance(target, cst.Tuple | cst.List):
                yield Binding(self.code(target), value, None, node)  # type: ignore[arg-type]  # a statement that binds has a value
                continue
            given = value.elements if isinstance(value, cst.Tuple) else ()
            is_each = len(given) == len(target.elements)
            for place, one in enumerate(target.elements):
                part = given[place].value if is_each else value
                name = self.code(one.value)
                yield Binding(name, part, None if is_each else place, node)  # type: ignore[arg-type]  # the same

    def _walk(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """A node and its parts: none of an import, and no names that are no expressions."""
        coming = [node]
        while coming:
            node = coming.pop()
            yield node
            name = getattr(node, _NAMING.get(type(node), ""), None)
            is_import = isinstance(node, cst.Import | cst.ImportFrom)
            parts = () if is_import else [one for one in node.children if one is not name]
            self.parents.update(dict.fromkeys(parts, node))
            coming += reversed(parts)

    def meaning(self, node: cst.CSTNode) -> str:
        """The full dotted name that an expression stands for: ``torch.distributed.barrier``.

        A name that was not imported stands for itself; what is no dotted name, for nothing.
        """
        if isinstance(node, cst.Name):
            return self._names.get(node.value, node.value)
        if isinstance(node, cst.Attribute):
            owner = self.meaning(node.value)
            return f"{owner}.{node.attr.value}" if owner else ""
        return ""

    def calls(self, *endings: str) -> list[cst.Call]:
        """All calls of what ends with one of these dotted names."""
        dotted = tuple(f".{one}" for one in endings)
        return [one for one in self.every_call if f".{self.meaning(one.func)}".endswith(dotted)]

    def uses(self, name: str) -> list[cst.Name]:
        """Where a name stands as an expression."""
        return [one for one in self.nodes if isinstance(one, cst.Name) and one.value == name]

    def code(self, node: cst.CSTNode) -> str:
        return self.module.code_for_node(node)

    @cached_property
    def _positions(self) -> Any:
        wrapper = MetadataWrapper(self.module, unsafe_skip_copy=True)
        return wrapper.resolve(PositionProvider)

    def line(self, node: cst.CSTNode) -> int:
        """The number of the line that a node begins in, from 1."""
        number: int = self._positions[node].start.line
        return number

    def place(self, node: cst.CSTNode) -> tuple[int, int]:
        """The line and the column that a node begins in, from 1."""
        start = self._positions[node].start
        return start.line, start.column + 1

    def within(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """A node and all that it holds, in the order of the text."""
        return self._walk(node)

    def inside(self, node: cst.CSTNode) -> set[str]:
        """The text of every expression in a node, itself included."""
        return {self.code(one) for one in self._walk(node) if isinstance(one, cst.BaseExpression)}

    def block_line(self, node: cst.CSTNode) -> cst.CSTNode:
        """The line of a block, or the compound statement, that holds ``node``."""
        for parent in self.up(node):
            if isinstance(parent, Block):
                return node
            node = parent
        raise CannotDerive

    def up(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """What a node stands in, up to its function or the module, which comes last."""
        while node is not self.module:
            node = self.parents[node]
            yield node
            if isinstance(node, cst.FunctionDef):
                return

    def scope(self, node: cst.CSTNode) -> Scope:
        """The function, or the module, that ``node`` stands in."""
        *_, found = self.up(node)
        assert isinstance(found, Scope)
        return found

    def statement(self, node: cst.CSTNode) -> Statement:
        """The smallest statement that holds ``node``."""
        return next(one for one in (node, *self.up(node)) if isinstance(one, Statement))


def imported(node: cst.Import | cst.ImportFrom) -> list[tuple[cst.ImportAlias, str, str]]:
    """What each name of an import is called here, and the full name that it stands for."""
    start = ""
    if isinstance(node, cst.ImportFrom):
        module = cst.Module([]).code_for_node(node.module) if node.module else ""
        start = f"{'.' * len(node.relative)}{module}."
    found = []
    for one in () if isinstance(node.names, cst.ImportStar) else node.names:
        name = one.evaluated_alias or one.evaluated_name.partition(".")[0]
        found.append((one, name, start + one.evaluated_name))
    return found


def positional(call: cst.Call) -> list[cst.BaseExpression]:
    """What a call is given without a name."""
    return [one.value for one in call.args if one.keyword is None and not one.star]


def by_name(call: cst.Call) -> dict[str, cst.BaseExpression]:
    """What a call is given by name."""
    return {one.keyword.value: one.value for one in call.args if one.keyword}


class TreeEdits(cst.CSTTransformer):
    """Changes of a tree; everything else stays as it is, comments and layout included."""

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
        """Make another of a node, whose own parts are changed by then."""
        self._changes[node] = how

    def replace(self, node: cst.CSTNode, text: str) -> None:
        self._changes[node] = lambda _: cst.parse_expression(text)

    def remove(self, node: cst.CSTNode) -> None:
        """Take one of a list away; a block that is left empty gets a ``pass``."""
        self._gone.add(node)

    def wrap(self, lines: Sequence[cst.CSTNode], header: str) -> None:
        """Put neighbours of a block under one line, as ``if pace.is_main:``."""
        self._heads[lines[0]] = header
        self._followers.update(dict.fromkeys(lines[1:], lines[0]))

    def remove_calls(self, script: SourceTree, *endings: str) -> None:
        """Take away what is only a call of one of these."""
        statements = [script.statement(one) for one in script.calls(*endings)]
        self._gone.update(one for one in statements if isinstance(one, cst.Expr))

    def insert(self, line: cst.CSTNode, text: str, *, is_before: bool = False) -> None:
        """Put a line beside one of a block; several before it in the order of the calls."""
        if is_before:
            self._before.setdefault(line, []).append(text)
        else:
            self._after[line] = text

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        if original_node in self._gone:
            return cst.RemoveFromParent()
        if isinstance(original_node, Block):
            updated_node = self._rebuilt(updated_node, original_node.body)
        for field in ("args", "names"):  # the last of a list ends as the last one did
            listed, left = getattr(original_node, field, ()), getattr(updated_node, field, ())
            if left and isinstance(listed, Sequence) and self._gone.issuperset(listed[-1:]):
                last = left[-1].with_changes(comma=listed[-1].comma)
                updated_node = updated_node.with_changes(**{field: [*left[:-1], last]})
        how = self._changes.get(original_node)
        return updated_node if how is None else how(updated_node)

    def _rebuilt(self, block: Any, before: Sequence[Any]) -> Any:
        """A block with lines put in and taken out; comments above those stay."""
        body: list[Any] = []
        above: list[cst.EmptyLine] = []
        lines = iter(block.body)  # libcst has left out those of which nothing is left
        for old in before:
            if old in self._gone:  # a compound statement, with the comments above it
                continue
            above += old.leading_lines
            for text in self._before.get(old, ()):
                body.append(_line(text, above))
                above = []
            if not isinstance(old, cst.SimpleStatementLine) or not self._gone.issuperset(old.body):
                self._put(body, old, next(lines).with_changes(leading_lines=above))
                above = []
            if old in self._after:
                body.append(_line(self._after[old], above))
                above = []
        rest = {"footer": [*above, *block.footer]} if above else {}
        return block.with_changes(body=body, **rest)

    def _put(self, body: list[Any], old: cst.CSTNode, new: Any) -> None:
        """Add a line, under its head where it has one."""
        if old in self._followers:
            under = body[-1].body
            body[-1] = body[-1].with_changes(body=under.with_changes(body=[*under.body, new]))
        elif old in self._heads:
            head = cst.parse_statement(f"{self._heads[old]}\n    pass\n")
            assert isinstance(head, cst.With | cst.If)
            under = head.body.with_changes(body=[new.with_changes(leading_lines=())])
            body.append(head.with_changes(body=under, leading_lines=new.leading_lines))
        else:
            body.append(new)


def _line(text: str, above: Sequence[cst.EmptyLine]) -> Any:
    line = cst.parse_statement(text)
    return line.with_changes(leading_lines=[*above, *line.leading_lines])
