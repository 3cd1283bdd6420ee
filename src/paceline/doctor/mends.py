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
        plain = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
        comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
        for name, value in words.items():
            if name in old:
                continue
            last = args[-1].comma if args else cst.MaybeSentinel.DEFAULT
            if args:
                args[-1] = args[-1].with_changes(comma=comma)
            args.append(
                cst.Arg(cst.parse_expression(value), cst.Name(name), equal=plain, comma=last)
            )
        return made.with_changes(args=args)

    edits.change(call, changed)
