"""What a loop does around its step: gradients that it clips, weights that it changes by hand.

    clip_grad_norm_(...)                  pace.clip_grad_norm_(...), where a step comes after it

    optimizer.step()                      def behind_step(*_):
    for p in net.parameters():      ->        for p in net.parameters(): p.data.clamp_(-c, c)
        p.data.clamp_(-c, c)              optimizer.register_step_post_hook(behind_step)

The hook is torch's own, so the script does what it did; under full-sync and local-sgd each worker's
step has it. Lines that need what the loop makes stay where they are. This module must not know how
a tree is edited.
"""

import re
import textwrap
from collections.abc import Iterator
from typing import NamedTuple

import libcst as cst

from .dataflow import parameters
from .parts import Parts
from .tree import SourceTree, TreeEdits, by_name

_OF_A_MODEL = ("parameters", "named_parameters")
_DRAWS = re.compile(
    r"(^|[._])(rand\w*|normal_?|uniform_?|bernoulli_?|multinomial|dropout\w*|exponential_|cauchy_|"
    r"geometric_|random_|trunc_normal_)$"
)


class StepHook(NamedTuple):
    """One hook.

    Attributes:
        lines: of the loop, which go into it.
        text: two statements: the function, and its registration.
    """

    lines: list[cst.CSTNode]
    text: tuple[str, str]


def step_hooks(parts: Parts) -> Iterator[StepHook]:
    """What a script changes in weights behind a step that it makes at one place only."""
    script = parts.script
    steps = [(call, script.code(one)) for call, one in parts.training.steps]
    models = set(parts.models)
    count = 0
    for call, optimizer in steps:
        is_own = isinstance(call.func, cst.Attribute) and script.code(call.func.value) == optimizer
        is_only = sum(name == optimizer for _, name in steps) == 1
        if not (is_own and is_only) or script.scope(call) is not parts.scope:
            continue
        lines = list(_lines_behind(script, call, models))
        if not lines or not all(_is_known_before(parts, one) for one in lines):
            continue
        count += 1
        name = "behind_step" if count == 1 else f"behind_step_{count}"
        if script.uses(name):
            continue
        body = textwrap.indent("".join(script.code(one) for one in lines).strip("\n"), "    ")
        function = f"def {name}(*_):\n{body}\n"
        yield StepHook(lines, (function, f"{optimizer}.register_step_post_hook({name})"))


def _lines_behind(script: SourceTree, call: cst.Call, models: set[str]) -> Iterator[cst.CSTNode]:
    """The lines right behind a step that change weights, and nothing else."""
    line = script.block_line(call)
    block = script.parents[line]
    if not isinstance(line, cst.SimpleStatementLine) or not isinstance(block, cst.IndentedBlock):
        return
    rows = list(block.body)
    for row in rows[rows.index(line) + 1 :]:
        if not _changes_weights(script, row, models):
            return
        yield row


def _changes_weights(script: SourceTree, row: cst.CSTNode, models: set[str]) -> bool:
    """Whether this goes over a model's parameters and calls what changes them in place."""
    if isinstance(row, cst.With):
        rows = list(row.body.body)
        is_plain = all("no_grad" in script.code(one.item) for one in row.items)
        return is_plain and all(_changes_weights(script, one, models) for one in rows)
    if not isinstance(row, cst.For) or row.orelse is not None:
        return False
    over = row.iter
    if not (isinstance(over, cst.Call) and isinstance(over.func, cst.Attribute)):
        return False
    is_of_model = script.code(over.func.value).split(".")[0] in {
        one.split(".")[0] for one in models
    }
    if over.func.attr.value not in _OF_A_MODEL or not is_of_model:
        return False
    return all(_is_in_place(script, one) for one in row.body.body)


def _is_in_place(script: SourceTree, row: cst.CSTNode) -> bool:
    """Whether this is ``p.data.clamp_(...)`` or the like, and draws nothing: of noise that each
    worker draws, the average has less."""
    if not isinstance(row, cst.SimpleStatementLine):
        return False
    calls = [one for one in script.within(row) if isinstance(one, cst.Call)]
    if any(_DRAWS.search(script.code(one.func)) for one in calls):
        return False
    for one in row.body:
        call = one.value if isinstance(one, cst.Expr) else None
        if not (isinstance(call, cst.Call) and isinstance(call.func, cst.Attribute)):
            return False
        name = call.func.attr.value
        if not name.endswith("_") or name.startswith("_") or ".grad" in script.code(call.func):
            return False
    return True


def _is_known_before(parts: Parts, line: cst.CSTNode) -> bool:
    """Whether all that these lines need is there before ``prepare``, and stays what it is."""
    script, flow, loop = parts.script, parts.flow, parts.loop
    held = list(script.within(line))
    own = {
        one.value
        for node in held
        if isinstance(node, cst.For)
        for one in script.within(node.target)
        if isinstance(one, cst.Name)
    }
    around = {
        one.value
        for node in (loop.node, *loop.outer)
        if isinstance(node, cst.For)
        for one in script.within(node.target)
        if isinstance(one, cst.Name)
    }
    inside = set(script.within(loop.outer[-1] if loop.outer else loop.node))
    for name in (one.value for one in held if isinstance(one, cst.Name)):
        if name in own:
            continue
        home = flow.home(name, parts.scope)
        bound = [one.node for one in flow.bindings(name, home)]
        if name in around or any(one in inside for one in bound):
            return False
        if bound and not all(script.order[one] < script.order[parts.before] for one in bound):
            return False
        if not bound and isinstance(home, cst.FunctionDef) and name not in parameters(home):
            return False
    return True


def clip(parts: Parts, edits: TreeEdits) -> None:
    """Clipping is of the averaged gradient, where it comes before a step."""
    script = parts.script
    for name, own in (("clip_grad_norm_", "clip_grad_norm_"), ("clip_grad_norm", "clip_grad_norm_"),
                      ("clip_grad_value_", "clip_grad_value_")):  # fmt: skip
        for call in script.calls(f"utils.{name}"):
            is_known = by_name(call).keys() <= {"parameters", "max_norm", "norm_type", "clip_value"}
            if is_known and not _is_behind(parts, call):
                edits.replace(call.func, f"pace.{own}")


def _is_behind(parts: Parts, call: cst.Call) -> bool:
    """Whether this stands behind the steps of its function, and no backward pass between: then
    it does to what is left of a gradient what it did before.
    """
    script, order = parts.script, parts.script.order
    scope = script.scope(call)
    steps = [order[one] for one, _ in parts.training.steps if script.scope(one) is scope]
    if not steps or max(steps) > order[call]:
        return False
    between = [one for one in script.every_call if max(steps) < order[one] < order[call]]
    return not any(
        isinstance(one.func, cst.Attribute) and one.func.attr.value == "backward" for one in between
    )
