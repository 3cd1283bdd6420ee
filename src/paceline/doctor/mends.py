"""Edits that several rules make to mend a script: remove a call, set or remove an argument.

Each function records its edits, and records none where the text is not simple enough for them. This
module must not know rules.
"""

from collections.abc import Callable
from typing import Any

import libcst as cst

from ..porting.tree import TreeEdits, by_name
from .facts import Facts


def remove_statement(facts: Facts, node: cst.CSTNode, edits: TreeEdits) -> None:
    """Remove a statement that consists of one call alone."""
    statement = facts.script.statement(node)
    if isinstance(statement, cst.Expr) and statement.value is node:
        edits.remove(statement)


def remove_argument(name: str) -> Callable[[Facts, cst.CSTNode, TreeEdits], None]:
    """Return a mend that removes a call's keyword argument of this name."""

    def mend(facts: Facts, node: cst.CSTNode, edits: TreeEdits) -> None:
        assert isinstance(node, cst.Call)
        for argument in node.args:
            if argument.keyword is not None and argument.keyword.value == name:
                edits.remove(argument)

    return mend


def set_arguments(edits: TreeEdits, call: cst.Call, **keywords: str) -> None:
    """Set keyword arguments of a call, and replace those that it has already."""
    present = by_name(call)

    def changed(node: Any) -> Any:
        args = [
            argument.with_changes(value=cst.parse_expression(keywords[argument.keyword.value]))
            if argument.keyword is not None and argument.keyword.value in keywords
            else argument
            for argument in node.args
        ]
        for name, value in keywords.items():
            if name not in present:
                args = _appended(args, node.whitespace_before_args, name, value)
        return node.with_changes(args=args)

    edits.change(call, changed)


def _appended(
    args: list[cst.Arg], before: cst.BaseParenthesizableWhitespace, name: str, value: str
) -> list[cst.Arg]:
    """Return the arguments and one more, separated as the others are, and ending as they did.

    Args:
        before: the whitespace before the first argument.
    """
    plain = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
    new = cst.Arg(cst.parse_expression(value), cst.Name(name), equal=plain)
    if not args:
        return [new]
    last, between = args[-1], before
    if len(args) > 1 and isinstance(args[-2].comma, cst.Comma):
        between = args[-2].comma.whitespace_after
    if isinstance(between, cst.ParenthesizedWhitespace):  # a line of its own; no comments copied
        between = between.with_changes(first_line=cst.TrailingWhitespace(), empty_lines=())
    else:
        between = cst.SimpleWhitespace(" ")
    separated = last.with_changes(
        comma=cst.Comma(whitespace_after=between), whitespace_after_arg=cst.SimpleWhitespace("")
    )
    ending = new.with_changes(comma=last.comma, whitespace_after_arg=last.whitespace_after_arg)
    return [*args[:-1], separated, ending]
