"""What is to be known of one script: its loaders, models, loops and what flows where.

    text -> SourceTree, Flow, OptimizerSteps -> Facts -> rules

    loaders      DataLoader(...), with the data they go over
    models       whether an expression is a module; classes of the script's own that are modules
    training     each loop that trains, as the order of its calls (`iteration`)
    tensors      which expressions are tensors of a device (`tensors`)
    chains       layers in the order in which they compute (`layers`)

Facts are read, never guessed: what the text does not say is None, and rules are silent on it.
Above 300 lines because every rule asks one object. This module must not know rules.
"""

import re
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, TypeVar

import libcst as cst

from ..porting.dataflow import AnyLoop, Flow
from ..porting.loops import OptimizerSteps
from ..porting.tree import SourceTree, by_name, imported, positional
from .values import literal, number

_ONWARDS = {"to", "cuda", "cpu", "eval", "train", "half", "float", "double", "bfloat16", "apply",
            "requires_grad_", "share_memory", "xpu"}  # fmt: skip
"""Methods of a module that give the module."""
_WRAPS = re.compile(
    r"(^|\.)(DataParallel|DistributedDataParallel|FullyShardedDataParallel)$|"
    r"^torch\.compile$|^torch\.jit\.script$"
)
_ZOO = re.compile(
    r"^torchvision\.models\.|^timm\.create_model$|\.from_pretrained$|^torch\.hub\.load$"
)
_ACCELERATOR = re.compile(
    r"""['"](cuda|mps|xpu)(:\d+)?['"]|\.cuda\(|torch\.accelerator|f['"]cuda:"""
)
_MODULE = re.compile(r"(^|\.)nn\.([A-Z]\w*|modules\.\w+\.[A-Z]\w*)$")
_LOSSES = re.compile(r"(^|\.)nn\.\w*Loss$|(^|\.)\w+Loss$")
_FUNCTIONAL_LOSSES = re.compile(r"(^|\.)functional\.(\w*loss|\w*cross_entropy\w*|kl_div)$")

T = TypeVar("T")


class Facts:
    """One script, asked.

    Attributes:
        script, flow, steps: its tree, what flows where, the steps of its optimizers.
        text: as it was read, or repaired.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.script = SourceTree(text)
        self.flow = Flow(self.script)
        self.steps = OptimizerSteps(self.flow)
        self._once: dict[object, Any] = {}
        self._wrapped: set[cst.CSTNode] = set()
        self._made: dict[cst.CSTNode, list[cst.Call]] = {}

    def once(self, key: object, make: Callable[[], T]) -> T:
        """What many rules ask is found once."""
        if key not in self._once:
            self._once[key] = make()
        found: T = self._once[key]
        return found

    # -- words ----------------------------------------------------------------------------------

    @cached_property
    def uncommented(self) -> str:
        """The text without what is said in comments only."""
        return re.sub(r"(?m)#.*$", "", self.text)

    def code(self, node: cst.CSTNode) -> str:
        return self.script.code(node).strip()

    def meaning(self, call: cst.BaseExpression) -> str:
        """The full dotted name of what is called here; of a method of anything ``.name``."""
        func = call.func if isinstance(call, cst.Call) else call
        name = self.script.meaning(func)
        if not name and isinstance(func, cst.Attribute):
            return f".{func.attr.value}"
        return name

    def method(self, call: cst.BaseExpression) -> str:
        """The name of the method that is called; empty: it is no method."""
        func = call.func if isinstance(call, cst.Call) else None
        return func.attr.value if isinstance(func, cst.Attribute) else ""

    def owner(self, call: cst.Call) -> cst.BaseExpression:
        """What a method is called of."""
        assert isinstance(call.func, cst.Attribute)
        return call.func.value

    def given(self, call: cst.Call, name: str, place: int = -1) -> cst.BaseExpression | None:
        """An argument by its name, or at its place."""
        words, listed = by_name(call), positional(call)
        if name in words:
            return words[name]
        return listed[place] if 0 <= place < len(listed) else None

    def has_stars(self, call: cst.Call) -> bool:
        """Whether more is given than can be read: ``**options``."""
        return any(one.star for one in call.args)

    def methods(self, *names: str) -> Iterator[cst.Call]:
        """All calls of a method of one of these names, of whatever."""
        return (one for one in self.script.every_call if self.method(one) in names)

    @cached_property
    def uses_torch(self) -> bool:
        heads = ("torch", "torchvision", "lightning", "pytorch_lightning", "transformers",
                 "accelerate", "torchaudio", "paceline", "fastai", "ignite")  # fmt: skip
        names = [full for one in self.script.imports for _, _, full in imported(one)]
        names += [
            self.script.code(one.module) for one in self.script.imports
            if isinstance(one, cst.ImportFrom) and one.module is not None and not one.relative
        ]  # fmt: skip
        return any(one.partition(".")[0] in heads for one in names)

    @cached_property
    def has_accelerator(self) -> bool:
        """Whether it names a device other than the CPU, or leaves the device to a library."""
        by_library = self.script.calls("prepare", "fit", "Accelerator")
        return bool(by_library) or _ACCELERATOR.search(self.uncommented) is not None

    # -- models ---------------------------------------------------------------------------------

    @cached_property
    def modules(self) -> dict[str, cst.ClassDef]:
        """Classes of the script's own that are modules, also by one another."""
        found: dict[str, cst.ClassDef] = {}
        for _ in range(3):
            for name, node in self.flow.classes.items():
                bases = [self.script.meaning(one.value) for one in node.bases]
                if any(re.search(r"(^|\.)nn\.(\w+\.)*\w+$", one) or one in found for one in bases):
                    found[name] = node
        return found

    def made(self, expr: cst.BaseExpression) -> list[cst.Call]:
        """The calls that an expression may come from, past ``.to(device)`` and wrappers."""
        if expr not in self._made:
            self._made[expr] = self._find_made(expr)
        return self._made[expr]

    def _find_made(self, expr: cst.BaseExpression) -> list[cst.Call]:
        found: list[cst.Call] = []
        coming, seen = list(self.flow.origins(expr)), set[cst.CSTNode]()
        while coming:
            one = coming.pop()
            if not isinstance(one, cst.Call) or one in seen:
                continue
            seen.add(one)
            if self.method(one) in _ONWARDS:
                coming += self.flow.origins(self.owner(one))
            elif _WRAPS.search(self.script.meaning(one.func)) and positional(one):
                self._wrapped.add(expr)
                coming += self.flow.origins(positional(one)[0])
            else:
                found.append(one)
        return found

    def is_wrapped(self, expr: cst.BaseExpression) -> bool:
        """Whether this may be a model in DataParallel or its kin, or a compiled one."""
        self.made(expr)
        return expr in self._wrapped

    def is_module_call(self, call: cst.Call) -> bool:
        """Whether this makes a module."""
        name = self.script.meaning(call.func)
        return (
            _MODULE.search(name) is not None
            or name in self.modules
            or (_ZOO.search(name) is not None and "okenizer" not in name)
        )

    @cached_property
    def _with_parameters(self) -> set[str]:
        """Whose ``parameters()`` are asked for, by their text."""
        return {
            self.code(self.owner(one)) for one in self.methods("parameters", "named_parameters")
        }

    def is_model(self, expr: cst.BaseExpression) -> bool:
        """Whether this is a module whose parameters may be trained; no loss, no list."""
        made = self.made(expr)
        if any(self.is_module_call(one) and not self.is_loss_call(one) for one in made):
            return True
        is_named = isinstance(expr, cst.Name | cst.Attribute) and self.code(expr) != "self"
        is_unknown = not any(self._is_known(one) for one in made)
        return is_named and is_unknown and self.code(expr) in self._with_parameters

    def _is_known(self, made: cst.Call) -> bool:
        """Whether the text, or torch, says what this makes."""
        name = self.script.meaning(made.func)
        is_own = name in self.flow.classes or self.flow.function_of(made) is not None
        return is_own or name.startswith("torch.") or self.is_loss_call(made)

    def is_loss_call(self, call: cst.Call) -> bool:
        """Whether this makes a loss function."""
        return _LOSSES.search(self.script.meaning(call.func)) is not None

    def loss_kind(self, call: cst.Call) -> str:
        """``CrossEntropyLoss``, ``cross_entropy`` ... where this computes a loss; else empty."""
        name = self.script.meaning(call.func)
        if _FUNCTIONAL_LOSSES.search(name):
            return name.rpartition(".")[2]
        makers = [call.func] if isinstance(call.func, cst.Call) else self.made(call.func)
        for one in makers:
            if isinstance(one, cst.Call) and self.is_loss_call(one):
                return self.script.meaning(one.func).rpartition(".")[2]
        return ""

    def forward_calls(self) -> Iterator[cst.Call]:
        """Calls of a model."""
        found = self.once("forward_calls", self._find_forward_calls)
        yield from found

    def _find_forward_calls(self) -> list[cst.Call]:
        return [
            call for call in self.script.every_call
            if isinstance(call.func, cst.Name | cst.Attribute) and self.is_model(call.func)
        ]  # fmt: skip

    # -- loaders --------------------------------------------------------------------------------

    @cached_property
    def loaders(self) -> list[cst.Call]:
        """Each ``DataLoader(...)``."""
        return [
            one for one in self.script.calls("DataLoader")
            if self.script.meaning(one.func) in ("DataLoader", "torch.utils.data.DataLoader")
        ]  # fmt: skip

    def loaders_of(self, expr: cst.BaseExpression) -> list[cst.Call]:
        """The ``DataLoader(...)`` that an expression may be."""
        made = [expr] if isinstance(expr, cst.Call) else self.flow.origins(expr)
        return [one for one in made if isinstance(one, cst.Call) and one in self.loaders]

    def option(self, loader: cst.Call, name: str) -> str | None:
        """What a loader is given by name, as written; None: nothing, so that the default holds."""
        value = by_name(loader).get(name)
        return None if value is None else self.code(value)

    def data_of(self, loader: cst.Call) -> cst.BaseExpression | None:
        return self.given(loader, "dataset", 0)

    def batch_size(self, loader: cst.Call) -> int | None:
        """Where the text says it; 1 is the default."""
        given = self.given(loader, "batch_size", 1)
        if given is None:
            return 1 if by_name(loader).get("batch_sampler") is None else None
        return number(self.flow, given)

    def loops_over(self, loader: cst.Call) -> list[cst.For]:
        """The loops that go over this loader, through enumerate, tqdm and names."""
        return [one for one in self._for_loops if loader in self.loaders_of_loop(one)]

    @cached_property
    def _for_loops(self) -> list[cst.For]:
        return [one for one in self.script.nodes if isinstance(one, cst.For)]

    def loaders_of_loop(self, loop: AnyLoop) -> list[cst.Call]:
        if not isinstance(loop, cst.For):
            return []
        over = self.steps.iterated(loop)
        if over is None:
            inside = set(self.script.within(loop.iter))
            return [one for one in self.loaders if one in inside]
        return self.loaders_of(over)

    # -- where something stands -----------------------------------------------------------------

    def contexts(self, node: cst.CSTNode) -> Iterator[cst.BaseExpression]:
        """What the ``with`` blocks and decorators around a node enter, in its own function."""
        for one in self.script.up(node):
            if isinstance(one, cst.With):
                yield from (item.item for item in one.items)
            if isinstance(one, cst.FunctionDef):
                yield from (each.decorator for each in one.decorators)

    def is_in(self, node: cst.CSTNode, pattern: str, depth: int = 0) -> bool:
        """Whether a node stands in a context, here or around every call of its function."""
        for one in self.contexts(node):
            for each in self.flow.origins(one) or [one]:
                if re.search(pattern, self.meaning(each)) or re.search(pattern, self.meaning(one)):
                    return True
        calls = self.flow.calls_of(self.script.scope(node)) if depth < 4 else []
        return bool(calls) and all(self.is_in(one.node, pattern, depth + 1) for one in calls)

    def following(self, node: cst.CSTNode) -> str:
        """The text of what stands after a node's line in its block; empty: nothing does."""
        line = self.script.block_line(node)
        block = self.script.parents[line]
        rows: list[cst.CSTNode] = (
            list(block.body) if isinstance(block, cst.IndentedBlock | cst.Module) else []
        )
        later = rows[rows.index(line) + 1 :] if line in rows else []
        return self.code(later[0]) if later else ""

    def bound_to(self, call: cst.Call) -> str:
        """The name that the statement of a call gives its value; empty: none."""
        statement = self.script.statement(call)
        if not isinstance(statement, cst.Assign):
            return ""
        return self.code(statement.targets[0].target)

    def flag(self, call: cst.Call, name: str) -> bool:
        """Whether ``name=True`` is written."""
        return literal(by_name(call).get(name)) == "True"
