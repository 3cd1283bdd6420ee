"""The reference of a run in plain PyTorch: one loop, and the update equation for a trace.

    w_{v+1} = optimizer(w_v, sum_i weight_i g(w_{version_i}, samples_i))

The replay takes only the pushes, their versions and their order from the trace; gradients,
averages and steps are its own. It must not use sessions, stores or engines.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from paceline.events import Apply, Lease, Ticket
from paceline.trace.records import Handed, Ordered, Record
from paceline.verification.plain import Order, State, differ, fresh, plain_loop, state_of
from paceline.workloads.base import Task
from runs import leases_of

__all__ = ["Order", "State", "average", "differ", "fresh", "plain_loop", "replay", "state_of"]


def replay(task: Task, records: Sequence[Record]) -> State:
    """The parameters after the pushes of a trace, each computed at its version."""
    model, optimizer = fresh(task)
    versions = [state_of(model)]
    order, leases = Order(task), _leases_of(records)
    pushes: dict[Ticket, State] = {}
    for record in records:
        if isinstance(record, Handed):
            ticket = record.fact.ticket
            batch = [order.batch(lease) for lease in leases[ticket[:2]]]
            pushes[ticket] = _gradient(model, task, versions[ticket.version], batch)
        elif isinstance(record, Ordered) and isinstance(record.order, Apply):
            update = average([pushes[one] for one in record.order.tickets], record.order.weights)
            model.load_state_dict(versions[-1])
            for name, parameter in model.named_parameters():
                parameter.grad = update.get(f"grad {name}")
            optimizer.step()
            buffers = {name: update[name] for name, _ in model.named_buffers()}
            versions.append({**state_of(model), **buffers})
    return versions[-1]


def replay_local_sgd(task: Task, records: Sequence[Record], num_workers: int) -> State:
    """The same if a push is the difference made by some local steps."""
    model, _ = fresh(task)
    versions = [state_of(model)]
    order, leases = Order(task), _leases_of(records)
    own = [fresh(task) for _ in range(num_workers)]
    pushes: dict[Ticket, State] = {}
    for record in records:
        if isinstance(record, Handed):
            ticket = record.fact.ticket
            mine, optimizer = own[ticket.member]
            mine.load_state_dict(versions[ticket.version])
            for lease in leases[ticket[:2]]:
                inputs, targets = order.batch(lease)
                optimizer.zero_grad()
                task.loss(mine(inputs), targets).backward()
                optimizer.step()
            pushes[ticket] = state_of(mine)
        elif isinstance(record, Ordered) and isinstance(record.order, Apply):
            tickets, weights = record.order
            versions.append(average([pushes[one] for one in tickets], weights))
    return versions[-1]


def _gradient(
    model: nn.Module, task: Task, state: State, batches: Sequence[tuple[Tensor, Tensor]]
) -> State:
    """The gradient at ``state``, each under "grad NAME", and the buffers that the pass leaves."""
    model.load_state_dict(state)
    model.zero_grad()
    for inputs, targets in batches:
        (task.loss(model(inputs), targets) / len(batches)).backward()
    grads = {
        f"grad {name}": parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return {**grads, **{name: buffer.clone() for name, buffer in model.named_buffers()}}


def average(states: Sequence[State], weights: Sequence[float]) -> State:
    """The weighted mean of numbers, the maximum of counters."""
    mean = {}
    for name, first in states[0].items():
        values = [state[name] for state in states]
        if first.is_floating_point():
            parts = [value * weight for value, weight in zip(values, weights, strict=True)]
            mean[name] = torch.stack(parts).sum(dim=0)
        else:
            mean[name] = torch.stack(values).amax(dim=0)
    return mean


def _leases_of(records: Sequence[Record]) -> dict[tuple[int, int], tuple[Lease, ...]]:
    return leases_of(record.order for record in records if isinstance(record, Ordered))
