"""A loss goes back through a network that its step does not update.

The backward pass computes gradients of the other network, usually a generator, and nothing uses
them.

Fix: detach() the output of the other network before it is passed to the first one.
Source: Radford, Metz, Chintala, 2015, as in PyTorch's DCGAN tutorial: netD(fake.detach()).
"""

from collections.abc import Iterator

import libcst as cst

from ...porting.tree import positional
from ..facts import Facts
from ..findings import Severity
from ..iteration import CallRole, Event, TrainingTurn, turns
from ..lineage import gradient_paths, loss_of, networks
from ..rule import Found, ScriptRule


def check(facts: Facts) -> Iterator[Found]:
    trained = [networks(facts, optimizer) for _, optimizer in facts.steps.steps]
    if not all(trained):
        return
    for turn in turns(facts):
        for index, event in enumerate(turn.events):
            if event.role is not CallRole.BACKWARD or facts.method(event.call) != "backward":
                continue
            steps = list(_steps_using(turn, index))
            changed = [networks(facts, _optimizer(facts, step)) for step in steps]
            if changed and all(changed):
                used = _used_by_others(facts, turn, event)
                for found in _through(facts, event, set().union(*changed), set().union(*trained)):
                    if found.node not in used:
                        yield found


def _used_by_others(facts: Facts, turn: TrainingTurn, event: Event) -> set[cst.Call]:
    """Return the calls of models whose graph another loss of the turn goes through, too."""
    others = [
        other.call for other in turn.of(CallRole.BACKWARD)
        if other.call is not event.call and facts.method(other.call) == "backward"
    ]  # fmt: skip
    return {path.call for call in others for path in gradient_paths(facts, loss_of(facts, call))}


def _is_differentiated(facts: Facts, call: cst.Call) -> bool:
    """Whether autograd.grad() computes a gradient with respect to an argument of a call."""
    names = {facts.code(argument) for argument in positional(call)}
    return any(
        names & {facts.code(argument.value) for argument in grad.args}
        for grad in facts.script.calls("autograd.grad")
    )


def _through(
    facts: Facts, event: Event, changed: set[cst.Call], trained: set[cst.Call]
) -> Iterator[Found]:
    """Yield where a loss goes back through a network that its steps do not change.

    Args:
        changed: the calls that make the networks that the steps change.
        trained: the calls that make the networks that any step changes.
    """
    for path in gradient_paths(facts, loss_of(facts, event.call)):
        constructors = set(facts.constructors(path.call.func))
        inner = [
            call for call in path.behind
            if set(facts.constructors(call.func)) <= changed and not _is_differentiated(facts, call)
        ]  # fmt: skip
        if constructors and constructors <= trained - changed and inner:
            name = facts.code(path.call.func)
            yield Found(
                inner[-1],
                f"the gradient of {facts.code(inner[-1])} goes back through {name}, "
                "which this step does not update",
            )


def _steps_using(turn: TrainingTurn, index: int) -> Iterator[Event]:
    """Yield the steps that are meant to use the gradients of a backward pass.

    A step after the next backward pass uses them, too, unless zero_grad() comes in between. If its
    optimizer is never zeroed, that is another mistake, and the step is not meant to use them.

    Args:
        index: the index of the backward pass among the turn's events.
    """
    ever_zeroed = {event.subject for event in turn.of(CallRole.ZERO)}
    zeroed: set[str] = set()
    is_later = False
    for event in turn.events[index + 1 :]:
        if event.role is CallRole.ZERO:
            zeroed.add(event.subject)
        is_later = is_later or event.role is CallRole.BACKWARD
        is_meant = event.subject in ever_zeroed or not is_later
        if event.role is CallRole.STEP and event.subject not in zeroed and is_meant:
            yield event


def _optimizer(facts: Facts, step: Event) -> cst.BaseExpression:
    return next(optimizer for call, optimizer in facts.steps.steps if call is step.call)


_GAN = """
import torch
from torch import nn
from torch.utils.data import DataLoader
G = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))
D = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
opt_g = torch.optim.Adam(G.parameters(), lr=1e-4)
opt_d = torch.optim.Adam(D.parameters(), lr=1e-4)
loader = DataLoader(torch.randn(512, 16), batch_size=64, shuffle=True)
for epoch in range(10):
    for real in loader:
        fake = G(torch.randn(real.size(0), 8))
        d_loss = D({}).mean() - D(real).mean()
        opt_d.zero_grad()
        d_loss.backward()
        opt_d.step()
        opt_g.zero_grad()
        g_loss = -D(G(torch.randn(real.size(0), 8))).mean()
        g_loss.backward()
        opt_g.step()
"""
_SHARED = """
import torch
from torch import nn
G, D = nn.Linear(8, 16), nn.Linear(16, 1)
opt_g = torch.optim.Adam(G.parameters())
opt_d = torch.optim.Adam(D.parameters())
for real in batches:
    score = D(G(torch.randn(64, 8)))
    d_loss = score.mean() - D(real).mean()
    opt_d.zero_grad()
    d_loss.backward(retain_graph=True)
    opt_g.zero_grad()
    g_loss = -score.mean()
    g_loss.backward()
    opt_d.step()
    opt_g.step()
"""
_TOGETHER = """
import torch
from torch import nn
encoder, decoder = nn.Linear(8, 4), nn.Linear(4, 8)
first = torch.optim.SGD(encoder.parameters(), lr=0.1)
second = torch.optim.SGD(decoder.parameters(), lr=0.1)
for x in torch.randn(64, 8).split(8):
    first.zero_grad()
    second.zero_grad()
    loss = (decoder(encoder(x)) - x).pow(2).mean()
    loss.backward()
    first.step()
    second.step()
"""
RULE = ScriptRule.of(
    __name__, __doc__, Severity.COST, check,
    sick=(_GAN.format("fake"), _GAN.format("fake").replace("        opt_g.zero_grad()\n", "")),
    healthy=(
        _GAN.format("fake.detach()"),
        _GAN.format("fake").replace("fake = G(torch.randn(real.size(0), 8))", "with torch.no_grad():\n            fake = G(torch.randn(real.size(0), 8))"),
        _TOGETHER, _SHARED, _SHARED.replace("    opt_g.zero_grad()\n", "    opt_d.step()\n    opt_g.zero_grad()\n"),
        _GAN.format("fake").replace("        opt_d.zero_grad()", "        grad = torch.autograd.grad(D(fake).sum(), fake, create_graph=True)\n        opt_d.zero_grad()"),
        _GAN.format("fake").replace("        opt_g.zero_grad()\n", "").replace("        fake = ", "        opt_g.zero_grad()\n        fake = "),
    ),
)  # fmt: skip
