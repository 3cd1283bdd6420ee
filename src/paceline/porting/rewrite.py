"""From a script for DistributedDataParallel to the same script for Paceline, pass by pass.

Each pass reads the text again, so none knows what the ones before it moved:

    model, optimizer, loader   ->  one line after they exist: pace.prepare(...)
    for batch, for epoch       ->  with pace.step(), pace.epochs
    and, where the group is made in any case:
    rank as a device           ->  pace.device
    DDP(model), model.module   ->  model
    DistributedSampler         ->  nothing: mini-batches are leased
    init_process_group, spawn  ->  nothing: paceline launch starts the workers
    get_rank, get_world_size   ->  pace.is_main, pace.worker, pace.num_workers

Where the group is made under an ``if``, that branch stays as it is: `launch` sets no RANK for such
a script, so it runs as it does by plain ``python``. This module must not know where a script lies
or who asked.
"""

import ast
from collections.abc import Callable

from .dataflow import CannotDerive, Flow, Loop
from .syntax import Edit, Scope, Source
from .ungroup import INIT, WRAP, ungroup

__all__ = ["CannotDerive", "Parts", "parts_of", "port"]

_CONNECT = "pace = paceline.connect()"


class Parts:
    """What `prepare` would be given, by the names of one function.

    Raises:
        CannotDerive: its optimizer, loader or loop cannot be found.
    """

    def __init__(self, source: Source) -> None:
        self.flow = flow = Flow(source)
        self.loop: Loop = flow.loop()
        wraps = list(source.calls(WRAP))
        models = {_target(source, one) for one in wraps}
        if len(models) != 1:
            raise CannotDerive
        self.scope: Scope = source.scope(wraps[0])
        self.uses: list[ast.stmt] = []
        here = source.scope(self.loop.node)
        if here is self.scope:
            self.uses.append(self.loop.node)
        self.model = models.pop()
        self.optimizer = flow.express(
            self.loop.optimizer, self.loop.optimizer_scope, self.scope, self.uses
        )
        self.loader = flow.express(self.loop.loader, here, self.scope, self.uses)
        self.wraps = [source.statement(one) for one in wraps]
        inits = [*source.calls(INIT), *wraps]
        self.is_flagged = all(flow.is_conditional(one) for one in inits)

    @property
    def names(self) -> list[str]:
        return [self.model, self.optimizer, self.loader]


def parts_of(source: Source) -> Parts | None:
    """What can be found; None where it cannot."""
    try:
        return Parts(source)
    except CannotDerive:
        return None


def port(source: Source) -> Source:
    """The script as it would be written for Paceline.

    Raises:
        CannotDerive: its optimizer, loader or loop cannot be found.
    """
    is_flagged = Parts(source).is_flagged
    if any(node.id == "pace" for node in ast.walk(source.tree) if isinstance(node, ast.Name)):
        raise CannotDerive
    passes: tuple[Callable[[Source], list[Edit]], ...] = (_prepare, _peek, _step, _epochs, _clip)
    for edits_of in passes:
        source = source.edited(edits_of(source))
    if not is_flagged:
        source = ungroup(source)
    return source.edited(_connect(source))


def _target(source: Source, wrap: ast.Call) -> str:
    statement = source.statement(wrap)
    if not isinstance(statement, ast.Assign) or statement.value is not wrap:
        raise CannotDerive
    return source.code(statement.targets[0])


def _prepare(source: Source) -> list[Edit]:
    """One line after model, optimizer, loader and its schedulers exist."""
    parts = Parts(source)
    flow = parts.flow
    binders = [one for name in parts.names if (one := flow.binder(name, parts.scope)) is not None]
    place = flow.place(parts.scope, [*binders, *parts.wraps], parts.uses)
    _check_loader(parts)
    names = list(parts.names)
    for one in flow.statements(parts.scope):
        is_made = isinstance(one, ast.Assign) and isinstance(one.value, ast.Call)
        if is_made and "lr_scheduler." in source.meaning(one.value.func):  # type: ignore[attr-defined]
            names.append(source.code(one.targets[0]))  # type: ignore[attr-defined]
            place = flow.place(parts.scope, [place, one], parts.uses)
    listed = ", ".join(names)
    # DistributedDataParallel's loaders count per worker; so the run keeps its mathematics.
    batch = "" if parts.is_flagged else ', batch="per-worker"'
    return [source.insert_after(place, f"{listed} = pace.prepare({listed}{batch})")]


def _check_loader(parts: Parts) -> None:
    """What the loop runs over is a loader, and no list of one's own."""
    flow = parts.flow
    binder = flow.binder(parts.loader, parts.scope)
    while isinstance(binder, ast.Assign) and not flow.makes_loader(binder.value):
        inner = binder.value
        if not isinstance(inner, ast.Name):
            raise CannotDerive
        binder = flow.binder(inner.id, parts.scope)


def _peek(source: Source) -> list[Edit]:
    """A look at one batch beside the loop is one into the plain loader: it opens no epoch."""
    loader = source.code(Parts(source).loop.loader)
    return [
        source.replace(call.args[0], f"{loader}.plain")
        for call in source.calls("iter")
        if call.args and source.code(call.args[0]) == loader
    ]


def _step(source: Source) -> list[Edit]:
    """``with pace.step()`` around what is done with a batch."""
    body = Flow(source).loop().node.body
    return [source.insert_before(body[0], "with pace.step():"), *source.indent(body)]


def _epochs(source: Source) -> list[Edit]:
    """``pace.epochs`` where epochs are counted from 0."""
    edits = []
    for call in source.calls("range"):
        loop = source.parent(call)
        if (
            isinstance(loop, ast.For)
            and loop.iter is call
            and "epoch" in source.code(loop.target)
            and len(call.args) == 1
        ):
            edits.append(source.replace(call.func, "pace.epochs"))
    return edits


def _clip(source: Source) -> list[Edit]:
    """Clipping is of the averaged gradient."""
    return [
        source.replace(call.func, "pace.clip_grad_norm_")
        for call in source.calls("utils.clip_grad_norm_")
        if len(call.args) + len(call.keywords) == 2 and "unscale_" not in source.text
    ]


def _connect(source: Source) -> list[Edit]:
    """``import paceline`` beside torch's, and ``pace`` after the imports on top."""
    imports = [one for one in source.tree.body if isinstance(one, ast.Import | ast.ImportFrom)]
    if not imports:
        raise CannotDerive
    last = imports[0]
    for one in source.tree.body[source.tree.body.index(last) :]:
        if not isinstance(one, ast.Import | ast.ImportFrom):
            break
        last = one
    torch = next((one for one in imports if source.code(one).split()[1].startswith("torch")), last)
    return [
        source.insert_before(torch, "import paceline"),
        source.insert_after(last, f"\n{_CONNECT}"),
    ]
