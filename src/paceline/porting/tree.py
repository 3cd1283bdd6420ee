"""A script as a tree that can be asked what its names mean, and edited where its nodes stand.

    text -> libcst -> SourceTree -> a pass fills TreeEdits -> the text again, else unchanged

The tree keeps comments and layout, so that a diff shows what was meant. This module must not know
what is edited or why.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import libcst as cst

_NAMING = {
    cst.Attribute: "attr", cst.Arg: "keyword", cst.Param: "name", cst.FunctionDef: "name",
    cst.ClassDef: "name",
}  # fmt: skip
"""Where a node has a name that is no expression."""
Scope: TypeAlias = cst.Module | cst.FunctionDef
Block: TypeAlias = cst.Module | cst.IndentedBlock
Statement: TypeAlias = cst.BaseSmallStatement | cst.BaseCompoundStatement


class CannotDerive(Exception):
    """The script is written in a way that is not followed."""


class SourceTree:
    """One text with its tree; nodes in the order of the text.

    Attributes:
        parents: of every node but the module.
        assigned: the value of every assignment, and the text of its first target.
    """

    def __init__(self, text: str) -> None:
        try:
            self.module = cst.parse_module(text)
        except cst.ParserSyntaxError:
            raise CannotDerive from None
        self.parents: dict[cst.CSTNode, cst.CSTNode] = {}
        self.nodes = list(self._walk(self.module))
        self._calls = [one for one in self.nodes if isinstance(one, cst.Call)]
        self.imports = [one for one in self.nodes if isinstance(one, cst.Import | cst.ImportFrom)]
        names = [pair for one in self.imports for pair in imported(one)]
        self._names = {name: full for _, name, full in names if not full.startswith(f"{name}.")}
        assigns = [one for one in self.nodes if isinstance(one, cst.Assign)]
        self.assigned = [(one.value, self.code(one.targets[0].target)) for one in assigns]

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
        return [one for one in self._calls if f".{self.meaning(one.func)}".endswith(dotted)]

    def uses(self, name: str) -> list[cst.Name]:
        """Where a name stands as an expression."""
        return [one for one in self.nodes if isinstance(one, cst.Name) and one.value == name]

    def code(self, node: cst.CSTNode) -> str:
        return self.module.code_for_node(node)

    def inside(self, node: cst.CSTNode) -> set[str]:
        """The text of every expression in a node, itself included."""
        return {self.code(one) for one in self._walk(node) if isinstance(one, cst.BaseExpression)}

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
        self._before: dict[cst.CSTNode, str] = {}
        self._after: dict[cst.CSTNode, str] = {}

    def __bool__(self) -> bool:
        return any((self._changes, self._gone, self._before, self._after))

    def change(self, node: cst.CSTNode, how: Callable[[Any], Any]) -> None:
        """Make another of a node, whose own parts are changed by then."""
        self._changes[node] = how

    def replace(self, node: cst.CSTNode, text: str) -> None:
        self._changes[node] = lambda _: cst.parse_expression(text)

    def remove(self, node: cst.CSTNode) -> None:
        """Take one of a list away; a block that is left empty gets a ``pass``."""
        self._gone.add(node)

    def remove_calls(self, script: SourceTree, *endings: str) -> None:
        """Take away what is only a call of one of these."""
        statements = [script.statement(one) for one in script.calls(*endings)]
        self._gone.update(one for one in statements if isinstance(one, cst.Expr))

    def insert(self, line: cst.CSTNode, text: str, *, is_before: bool = False) -> None:
        """Put a line beside one of a block."""
        (self._before if is_before else self._after)[line] = text

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
            above += old.leading_lines
            if old in self._before:
                body.append(_line(self._before[old], above))
                above = []
            if not isinstance(old, cst.SimpleStatementLine) or not self._gone.issuperset(old.body):
                body.append(next(lines).with_changes(leading_lines=above))
                above = []
            if old in self._after:
                body.append(_line(self._after[old], above))
                above = []
        rest = {"footer": [*above, *block.footer]} if above else {}
        return block.with_changes(body=body, **rest)


def _line(text: str, above: Sequence[cst.EmptyLine]) -> Any:
    line = cst.parse_statement(text)
    return line.with_changes(leading_lines=[*above, *line.leading_lines])
