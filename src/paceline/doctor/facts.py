"""The facts of one script that rules ask for: its loaders, models, loops and data flow.

    text -> SourceTree, Flow, OptimizerSteps -> Facts -> rules

    loaders      DataLoader(...), with the data they iterate over
    models       whether an expression is a module; the script's own module classes
    training     each training loop, as its calls in order (`iteration`)
    tensors      which expressions are tensors on a device (`tensors`)
    chains       layers in the order in which they compute (`layers`)

Facts are read, never guessed: what the text does not say is None, and rules are silent about it.
Above 300 lines because every rule asks one object. This module must not know rules.
"""

import re
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, TypeVar

import libcst as cst

from ..porting.dataflow import AnyLoop, Flow
from ..porting.loops import OptimizerSteps
from ..porting.tree import CannotDerive, SourceTree, by_name, imported, positional
from .values import literal, number

_RETURNS_ITSELF = {"to", "cuda", "cpu", "eval", "train", "half", "float", "double", "bfloat16",
                   "apply", "requires_grad_", "share_memory", "xpu"}  # fmt: skip
"""Methods of a module that return the module itself."""
_WRAPPERS = re.compile(
    r"(^|\.)(DataParallel|DistributedDataParallel|FullyShardedDataParallel)$|"
    r"^torch\.compile$|^torch\.jit\.script$"
)
_PRETRAINED = re.compile(
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
    """Everything that rules know about one script.

    Attributes:
        text: the script as it was read, or repaired.
        script: its syntax tree.
        flow: its data flow, from names to the expressions that make their values.
        steps: the ``step()`` calls of its optimizers.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.script = SourceTree(text)
        self.flow = Flow(self.script)
        self.steps = OptimizerSteps(self.flow)
        self._cache: dict[object, Any] = {}
        self._wrapped: set[cst.CSTNode] = set()
        self._constructors: dict[cst.CSTNode, list[cst.Call]] = {}

    def once(self, key: object, make: Callable[[], T]) -> T:
        """Return ``make()``, computed once for each key."""
        if key not in self._cache:
            self._cache[key] = make()
        value: T = self._cache[key]
        return value

    # -- code -----------------------------------------------------------------------------------

    @cached_property
    def uncommented(self) -> str:
        """The script's text without its comments."""
        return re.sub(r"(?m)#.*$", "", self.text)

    def code(self, node: cst.CSTNode) -> str:
        """The text of a node, without whitespace around it."""
        return self.script.code(node).strip()

    def meaning(self, call: cst.BaseExpression) -> str:
        """Return the full dotted name of what a call calls, imports resolved.

        It is ``.name`` for a method of an expression that has no dotted name.
        """
        func = call.func if isinstance(call, cst.Call) else call
        name = self.script.meaning(func)
        if not name and isinstance(func, cst.Attribute):
            return f".{func.attr.value}"
        return name

    def method(self, call: cst.BaseExpression) -> str:
        """Return the name of the method that is called, or "" if the call is no method call."""
        func = call.func if isinstance(call, cst.Call) else None
        return func.attr.value if isinstance(func, cst.Attribute) else ""

    def owner(self, call: cst.Call) -> cst.BaseExpression:
        """Return the object whose method is called."""
        assert isinstance(call.func, cst.Attribute)
        return call.func.value

    def argument(self, call: cst.Call, name: str, position: int = -1) -> cst.BaseExpression | None:
        """Return an argument by its keyword, or else by its position; None if it is not passed."""
        keywords, arguments = by_name(call), positional(call)
        if name in keywords:
            return keywords[name]
        return arguments[position] if 0 <= position < len(arguments) else None

    def has_stars(self, call: cst.Call) -> bool:
        """Whether a call passes arguments that cannot be read: ``*args`` or ``**options``."""
        return any(argument.star for argument in call.args)

    def methods(self, *names: str) -> Iterator[cst.Call]:
        """Yield all calls of methods with one of these names, whatever their object is."""
        return (call for call in self.script.every_call if self.method(call) in names)

    @cached_property
    def uses_torch(self) -> bool:
        """Whether the script imports torch or a library on top of it."""
        packages = ("torch", "torchvision", "lightning", "pytorch_lightning", "transformers",
                 "accelerate", "torchaudio", "paceline", "fastai", "ignite")  # fmt: skip
        names = [full for line in self.script.imports for _, _, full in imported(line)]
        names += [
            self.script.code(line.module) for line in self.script.imports
            if isinstance(line, cst.ImportFrom) and line.module is not None and not line.relative
        ]  # fmt: skip
        return any(name.partition(".")[0] in packages for name in names)

    @cached_property
    def has_accelerator(self) -> bool:
        """Whether the script names a device other than the CPU, or lets a library choose one."""
        by_library = self.script.calls("prepare", "fit", "Accelerator")
        return bool(by_library) or _ACCELERATOR.search(self.uncommented) is not None

    # -- models ---------------------------------------------------------------------------------

    @cached_property
    def modules(self) -> dict[str, cst.ClassDef]:
        """The script's own module classes by name, also those that inherit from one another."""
        modules: dict[str, cst.ClassDef] = {}
        for _ in range(3):
            for name, node in self.flow.classes.items():
                bases = [self.script.meaning(base.value) for base in node.bases]
                if any(
                    re.search(r"(^|\.)nn\.(\w+\.)*\w+$", base) or base in modules for base in bases
                ):
                    modules[name] = node
        return modules

    def constructors(self, expr: cst.BaseExpression) -> list[cst.Call]:
        """Return the calls that may have made a value, before ``.to(device)`` and wrappers."""
        if expr not in self._constructors:
            self._constructors[expr] = self._find_constructors(expr)
        return self._constructors[expr]

    def _find_constructors(self, expr: cst.BaseExpression) -> list[cst.Call]:
        constructors: list[cst.Call] = []
        pending, seen = list(self.flow.origins(expr)), set[cst.CSTNode]()
        while pending:
            call = pending.pop()
            if not isinstance(call, cst.Call) or call in seen:
                continue
            seen.add(call)
            if self.method(call) in _RETURNS_ITSELF:
                pending += self.flow.origins(self.owner(call))
            elif _WRAPPERS.search(self.script.meaning(call.func)) and positional(call):
                self._wrapped.add(expr)
                pending += self.flow.origins(positional(call)[0])
            else:
                constructors.append(call)
        return constructors

    def is_wrapped(self, expr: cst.BaseExpression) -> bool:
        """Whether a model may be compiled, or wrapped in DataParallel or the like."""
        self.constructors(expr)
        return expr in self._wrapped

    def is_module_call(self, call: cst.Call) -> bool:
        """Whether a call makes a module."""
        name = self.script.meaning(call.func)
        return (
            _MODULE.search(name) is not None
            or name in self.modules
            or (_PRETRAINED.search(name) is not None and "okenizer" not in name)
        )

    @cached_property
    def _with_parameters(self) -> set[str]:
        """The expressions whose ``parameters()`` are taken somewhere, as text."""
        return {
            self.code(self.owner(call)) for call in self.methods("parameters", "named_parameters")
        }

    def is_model(self, expr: cst.BaseExpression) -> bool:
        """Whether a value is a module whose parameters may be trained, not a loss or a list."""
        constructors = self.constructors(expr)
        if any(self.is_module_call(call) and not self.is_loss_call(call) for call in constructors):
            return True
        is_named = isinstance(expr, cst.Name | cst.Attribute) and self.code(expr) != "self"
        is_unknown = not any(self._is_known(call) for call in constructors)
        return is_named and is_unknown and self.code(expr) in self._with_parameters

    def _is_known(self, constructor: cst.Call) -> bool:
        """Whether the script, or torch, defines what a call makes."""
        name = self.script.meaning(constructor.func)
        is_own = name in self.flow.classes or self.flow.function_of(constructor) is not None
        return is_own or name.startswith("torch.") or self.is_loss_call(constructor)

    def is_loss_call(self, call: cst.Call) -> bool:
        """Whether a call makes a loss function."""
        return _LOSSES.search(self.script.meaning(call.func)) is not None

    def loss_kind(self, call: cst.Call) -> str:
        """Return the loss that a call computes, as ``CrossEntropyLoss`` or ``kl_div``, or ""."""
        name = self.script.meaning(call.func)
        if _FUNCTIONAL_LOSSES.search(name):
            return name.rpartition(".")[2]
        constructors = (
            [call.func] if isinstance(call.func, cst.Call) else self.constructors(call.func)
        )
        for constructor in constructors:
            if isinstance(constructor, cst.Call) and self.is_loss_call(constructor):
                return self.script.meaning(constructor.func).rpartition(".")[2]
        return ""

    def forward_calls(self) -> Iterator[cst.Call]:
        """Yield the calls of models."""
        calls = self.once("forward_calls", self._find_forward_calls)
        yield from calls

    def _find_forward_calls(self) -> list[cst.Call]:
        return [
            call for call in self.script.every_call
            if isinstance(call.func, cst.Name | cst.Attribute) and self.is_model(call.func)
        ]  # fmt: skip

    # -- loaders --------------------------------------------------------------------------------

    @cached_property
    def loaders(self) -> list[cst.Call]:
        """Every ``DataLoader(...)`` call of the script."""
        return [
            call for call in self.script.calls("DataLoader")
            if self.script.meaning(call.func) in ("DataLoader", "torch.utils.data.DataLoader")
        ]  # fmt: skip

    def loaders_of(self, expr: cst.BaseExpression) -> list[cst.Call]:
        """Return the ``DataLoader(...)`` calls that may have made a value."""
        origins = [expr] if isinstance(expr, cst.Call) else self.flow.origins(expr)
        return [call for call in origins if isinstance(call, cst.Call) and call in self.loaders]

    def option(self, loader: cst.Call, name: str) -> str | None:
        """Return the text of a loader's keyword argument; None if the default holds."""
        value = by_name(loader).get(name)
        return None if value is None else self.code(value)

    def data_of(self, loader: cst.Call) -> cst.BaseExpression | None:
        """Return the data set that a loader is given."""
        return self.argument(loader, "dataset", 0)

    def batch_size(self, loader: cst.Call) -> int | None:
        """Return a loader's batch size, 1 by default; None if the text does not say it."""
        size = self.argument(loader, "batch_size", 1)
        if size is None:
            return 1 if by_name(loader).get("batch_sampler") is None else None
        return number(self.flow, size)

    def loops_over(self, loader: cst.Call) -> list[cst.For]:
        """Return the loops over this loader, also through enumerate, tqdm and other names."""
        return [loop for loop in self._for_loops if loader in self.loaders_of_loop(loop)]

    @cached_property
    def _for_loops(self) -> list[cst.For]:
        return [node for node in self.script.nodes if isinstance(node, cst.For)]

    def loaders_of_loop(self, loop: AnyLoop) -> list[cst.Call]:
        """Return the ``DataLoader(...)`` calls whose loader a loop may iterate over."""
        if not isinstance(loop, cst.For):
            return []
        iterated = self.steps.iterated(loop)
        if iterated is None:
            nodes = set(self.script.within(loop.iter))
            return [loader for loader in self.loaders if loader in nodes]
        return self.loaders_of(iterated)

    # -- the surroundings of a node -------------------------------------------------------------

    def contexts(self, node: cst.CSTNode) -> Iterator[cst.BaseExpression]:
        """Yield the contexts of ``with`` blocks around a node, and its function's decorators."""
        for ancestor in self.script.up(node):
            if isinstance(ancestor, cst.With):
                yield from (item.item for item in ancestor.items)
            if isinstance(ancestor, cst.FunctionDef):
                yield from (decorator.decorator for decorator in ancestor.decorators)

    def is_in(self, node: cst.CSTNode, pattern: str, depth: int = 0) -> bool:
        """Whether a node is inside a context, entered here or around every call of its function.

        Args:
            pattern: searched in the dotted name of the context, as ``no_grad$``.
        """
        for context in self.contexts(node):
            for origin in self.flow.origins(context) or [context]:
                if any(re.search(pattern, self.meaning(expr)) for expr in (origin, context)):
                    return True
        calls = self.flow.calls_of(self.script.scope(node)) if depth < 4 else []
        return bool(calls) and all(self.is_in(call.node, pattern, depth + 1) for call in calls)

    def following(self, node: cst.CSTNode) -> str:
        """Return the text of the statement after a node's own in its block, or ""."""
        try:
            line = self.script.block_line(node)
        except CannotDerive:  # def f(): y = x.cpu(); return y
            return ""
        block = self.script.parents[line]
        lines: list[cst.CSTNode] = (
            list(block.body) if isinstance(block, cst.IndentedBlock | cst.Module) else []
        )
        later = lines[lines.index(line) + 1 :] if line in lines else []
        return self.code(later[0]) if later else ""

    def bound_to(self, call: cst.Call) -> str:
        """Return the name that a call's value is assigned to, or ""."""
        statement = self.script.statement(call)
        if not isinstance(statement, cst.Assign):
            return ""
        return self.code(statement.targets[0].target)

    def flag(self, call: cst.Call, name: str) -> bool:
        """Whether a call passes ``name=True``."""
        return literal(by_name(call).get(name)) == "True"
