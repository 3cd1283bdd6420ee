"""What several rules do to mend a script: leave a call out, give or take an argument.

Each records edits, and none where the text is not as simple as it has to be. This module must not
know rules.
"""

from collections.abc import Callable
from typing import Any

import libcst as cst

from ..porting.tree import TreeEdits, by_name
from .facts import Facts


def leave_out(facts: Facts, node: cst.CSTNode, edits: TreeEdits) -> None:
    """A statement that is only this call goes."""
    statement = facts.script.statement(node)
    if isinstance(statement, cst.Expr) and statement.value is node:
        edits.remove(statement)


def without(name: str) -> Callable[[Facts, cst.CSTNode, TreeEdits], None]:
    """A call loses the argument of this name."""

    def mend(facts: Facts, node: cst.CSTNode, edits: TreeEdits) -> None:
        assert isinstance(node, cst.Call)
        for one in node.args:
            if one.keyword is not None and one.keyword.value == name:
                edits.remove(one)

    return mend


def give(edits: TreeEdits, call: cst.Call, **words: str) -> None:
    """A call is given arguments by name, instead of what it has of these names."""
    old = by_name(call)

    def changed(made: Any) -> Any:
        args = [
            one.with_changes(value=cst.parse_expression(words[one.keyword.value]))
            if one.keyword is not None and one.keyword.value in words
            else one
            for one in made.args
        ]
        for name, value in words.items():
            if name not in old:
                args = _followed(args, made.whitespace_before_args, name, value)
        return made.with_changes(args=args)

    edits.change(call, changed)


def _followed(
    args: list[cst.Arg], before: cst.BaseParenthesizableWhitespace, name: str, value: str
) -> list[cst.Arg]:
    """One argument more, apart from the last as others are, and ending as that did.

    Args:
        before: what stands before the first.
    """
    plain = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
    new = cst.Arg(cst.parse_expression(value), cst.Name(name), equal=plain)
    if not args:
        return [new]
    last, between = args[-1], before
    if len(args) > 1 and isinstance(args[-2].comma, cst.Comma):
        between = args[-2].comma.whitespace_after
    if isinstance(between, cst.ParenthesizedWhitespace):  # a line of its own, without its comments
        between = between.with_changes(first_line=cst.TrailingWhitespace(), empty_lines=())
    else:
        between = cst.SimpleWhitespace(" ")
    apart = last.with_changes(
        comma=cst.Comma(whitespace_after=between), whitespace_after_arg=cst.SimpleWhitespace("")
    )
    ended = new.with_changes(comma=last.comma, whitespace_after_arg=last.whitespace_after_arg)
    return [*args[:-1], apart, ended]
