"""A Python source that can be asked what its names mean, and edited where its nodes stand.

Every edit keeps all other characters as they are, comments and layout included, so that a diff
shows what was meant and nothing else. This module must not know what is edited or why.
"""

import ast
from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeAlias

Scope: TypeAlias = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef


class Edit(NamedTuple):
    """Replace the characters ``[start, stop)``."""

    start: int
    stop: int
    text: str


class Source:
    """One text with its tree; immutable: an edit gives a new one.

    Raises:
        SyntaxError: the text is no Python.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.tree = ast.parse(text)
        self.lines = text.splitlines(keepends=True)
        self._starts = [0]
        for line in self.lines:
            self._starts.append(self._starts[-1] + len(line))
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

    def statement(self, node: ast.AST) -> ast.stmt:
        """The smallest statement that holds ``node``."""
        while not isinstance(node, ast.stmt):
            node = self._parents[node]
        return node

    def scope(self, node: ast.AST) -> Scope:
        """The function, or the module, that ``node`` stands in."""
        while True:
            node = self.parent(node)
            if isinstance(node, Scope):
                return node

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """Where a node stands, in characters of the text."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return (
            self._offset(node.lineno, node.col_offset),
            self._offset(node.end_lineno, node.end_col_offset),
        )

    def code(self, node: ast.expr | ast.stmt) -> str:
        """The text of a node."""
        start, stop = self.span(node)
        return self.text[start:stop]

    def replace(self, node: ast.expr | ast.stmt, text: str) -> Edit:
        return Edit(*self.span(node), text)

    def remove(self, statement: ast.stmt) -> Edit:
        """Take a statement away with its lines; a block that it leaves empty gets a ``pass``."""
        blocks = (getattr(self.parent(statement), name, []) for name in ("body", "orelse"))
        if any(block == [statement] for block in blocks):
            return self.replace(statement, "pass")
        assert statement.end_lineno is not None
        return Edit(self._starts[statement.lineno - 1], self._starts[statement.end_lineno], "")

    def insert_before(self, statement: ast.stmt, text: str) -> Edit:
        """A line before a statement, indented like it."""
        start = self._starts[statement.lineno - 1]
        return Edit(start, start, f"{' ' * statement.col_offset}{text}\n")

    def insert_after(self, statement: ast.stmt, text: str) -> Edit:
        """A line after a statement, indented like it."""
        assert statement.end_lineno is not None
        stop = self._starts[statement.end_lineno]
        end = "" if self.text[:stop].endswith("\n") else "\n"
        return Edit(stop, stop, f"{end}{' ' * statement.col_offset}{text}\n")

    def indent(self, statements: list[ast.stmt]) -> list[Edit]:
        """Move statements four columns to the right; lines inside a text stay as they are."""
        first, last = statements[0].lineno, statements[-1].end_lineno
        assert last is not None
        inside_texts = {
            number
            for statement in statements
            for node in ast.walk(statement)
            if isinstance(node, ast.JoinedStr | ast.Constant)
            for number in range(node.lineno + 1, (node.end_lineno or 0) + 1)
        }
        return [
            Edit(self._starts[number - 1], self._starts[number - 1], "    ")
            for number in range(first, last + 1)
            if number not in inside_texts and self.lines[number - 1].strip()
        ]

    def edited(self, edits: Iterable[Edit]) -> "Source":
        """The source after these edits, which must not overlap.

        Of several at one place the first given comes first in the text.
        """
        text = self.text
        ordered = sorted(enumerate(dict.fromkeys(edits)), key=lambda one: (one[1].start, one[0]))
        for _, (start, stop, new) in ordered[::-1]:
            text = text[:start] + new + text[stop:]
        return Source(text)

    def _offset(self, line: int, column: int) -> int:
        """The tree counts columns in bytes of UTF-8."""
        before = self.lines[line - 1].encode()[:column] if line <= len(self.lines) else b""
        return self._starts[line - 1] + len(before.decode())


def _imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Each imported name with the full name it stands for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                if one.asname:
                    yield one.asname, one.name
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for one in node.names:
                yield one.asname or one.name, f"{node.module}.{one.name}"
