"""Rewrites what a loop does around its step: clipped gradients, weights changed by hand.

    clip_grad_norm_(...)                  pace.clip_grad_norm_(...), if a step comes after it

    optimizer.step()                      def behind_step(*_):
    for p in net.parameters():      ->        for p in net.parameters(): p.data.clamp_(-c, c)
        p.data.clamp_(-c, c)              optimizer.register_step_post_hook(behind_step)

The hook is torch's own, so the script does what it did before; under full-sync and local-sgd every
worker's step has it. Lines that need what the loop makes stay where they are. This module must not
know how a tree is edited.
"""

import re
import textwrap
from collections.abc import Iterator
from typing import NamedTuple

import libcst as cst

from .dataflow import parameters
from .parts import Parts
from .tree import SourceTree, TreeEdits, by_name

_PARAMETER_METHODS = ("parameters", "named_parameters")
_CLIPPING = {
    "clip_grad_norm_": "clip_grad_norm_",
    "clip_grad_norm": "clip_grad_norm_",
    "clip_grad_value_": "clip_grad_value_",
}
"""Functions of torch.nn.utils, and the methods of pace that replace them."""
_DRAWS = re.compile(
    r"(^|[._])(rand\w*|normal_?|uniform_?|bernoulli_?|multinomial|dropout\w*|exponential_|cauchy_|"
    r"geometric_|random_|trunc_normal_|choices?|shuffle|permutation|samples?|gauss|poisson)$"
)
"""Names of functions that draw random numbers."""


def draws(script: SourceTree, call: cst.Call) -> bool:
    """Whether a call draws random numbers, by the name of its function."""
    name = script.meaning(call.func) or script.code(call.func)  # of torch.empty(4).normal_()
    return _DRAWS.search(name) is not None


class StepHook(NamedTuple):
    """A hook of an optimizer's step.

    Attributes:
        lines: the loop's lines that move into it.
        text: two statements: the hook's function, and its registration.
    """

    lines: list[cst.CSTNode]
    text: tuple[str, str]


def step_hooks(parts: Parts) -> Iterator[StepHook]:
    """Yield hooks for weights changed after a step, for optimizers that step in one place only."""
    script = parts.script
    steps = [(call, script.code(optimizer)) for call, optimizer in parts.training.steps]
    models = set(parts.models)
    count = 0
    for call, optimizer in steps:
        is_own = isinstance(call.func, cst.Attribute) and script.code(call.func.value) == optimizer
        is_only = sum(name == optimizer for _, name in steps) == 1
        if not (is_own and is_only) or script.scope(call) is not parts.scope:
            continue
        lines = list(_lines_behind(script, call, models))
        if not lines or not all(_is_known_before(parts, line) for line in lines):
            continue
        count += 1
        name = "behind_step" if count == 1 else f"behind_step_{count}"
        if script.uses(name):
            continue
        body = textwrap.indent("".join(script.code(line) for line in lines).strip("\n"), "    ")
        function = f"def {name}(*_):\n{body}\n"
        yield StepHook(lines, (function, f"{optimizer}.register_step_post_hook({name})"))


def _lines_behind(script: SourceTree, call: cst.Call, models: set[str]) -> Iterator[cst.CSTNode]:
    """Yield the lines right after a step that change weights and do nothing else."""
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
    """Whether a line goes over a model's parameters and only changes them in place."""
    if isinstance(row, cst.With):
        inner_rows = list(row.body.body)
        is_plain = all("no_grad" in script.code(item.item) for item in row.items)
        return is_plain and all(_changes_weights(script, inner, models) for inner in inner_rows)
    if not isinstance(row, cst.For) or row.orelse is not None:
        return False
    over = row.iter
    if not (isinstance(over, cst.Call) and isinstance(over.func, cst.Attribute)):
        return False
    is_of_model = script.code(over.func.value).split(".")[0] in {
        model.split(".")[0] for model in models
    }
    if over.func.attr.value not in _PARAMETER_METHODS or not is_of_model:
        return False
    return all(_is_in_place(script, inner_row) for inner_row in row.body.body)


def _is_in_place(script: SourceTree, row: cst.CSTNode) -> bool:
    """Whether this is ``p.data.clamp_(...)`` or the like, and draws no random numbers.

    Averaging would weaken noise that each worker draws.
    """
    if not isinstance(row, cst.SimpleStatementLine):
        return False
    calls = [node for node in script.within(row) if isinstance(node, cst.Call)]
    if any(draws(script, call) for call in calls):
        return False
    for statement in row.body:
        call = statement.value if isinstance(statement, cst.Expr) else None
        if not (isinstance(call, cst.Call) and isinstance(call.func, cst.Attribute)):
            return False
        name = call.func.attr.value
        if not name.endswith("_") or name.startswith("_") or ".grad" in script.code(call.func):
            return False
    return True


def _is_known_before(parts: Parts, line: cst.CSTNode) -> bool:
    """Whether everything that a line needs exists before ``prepare``, and does not change."""
    script, flow, loop = parts.script, parts.flow, parts.loop
    nodes = list(script.within(line))
    own_targets = {
        name.value
        for node in nodes
        if isinstance(node, cst.For)
        for name in script.within(node.target)
        if isinstance(name, cst.Name)
    }
    loop_targets = {
        name.value
        for node in (loop.node, *loop.outer)
        if isinstance(node, cst.For)
        for name in script.within(node.target)
        if isinstance(name, cst.Name)
    }
    inside = set(script.within(loop.outer[-1] if loop.outer else loop.node))
    for name in (node.value for node in nodes if isinstance(node, cst.Name)):
        if name in own_targets:
            continue
        home = flow.home(name, parts.scope)
        assignments = [binding.node for binding in flow.bindings(name, home)]
        if name in loop_targets or any(node in inside for node in assignments):
            return False
        if assignments and not all(
            script.order[node] < script.order[parts.before] for node in assignments
        ):
            return False
        if not assignments and isinstance(home, cst.FunctionDef) and name not in parameters(home):
            return False
    return True


def clip(parts: Parts, edits: TreeEdits) -> None:
    """Let clipping before a step clip the averaged gradient."""
    script = parts.script
    for name, method in _CLIPPING.items():
        for call in script.calls(f"utils.{name}"):
            is_known = by_name(call).keys() <= {"parameters", "max_norm", "norm_type", "clip_value"}
            if is_known and not _is_behind(parts, call):
                edits.replace(call.func, f"pace.{method}")


def _is_behind(parts: Parts, call: cst.Call) -> bool:
    """Whether this is after its function's steps, with no backward pass in between.

    Then it acts on what is left of a gradient, as it did before.
    """
    script, order = parts.script, parts.script.order
    scope = script.scope(call)
    steps = [order[step] for step, _ in parts.training.steps if script.scope(step) is scope]
    if not steps or max(steps) > order[call]:
        return False
    calls_between = [
        other for other in script.every_call if max(steps) < order[other] < order[call]
    ]
    return not any(
        isinstance(other.func, cst.Attribute) and other.func.attr.value == "backward"
        for other in calls_between
    )
