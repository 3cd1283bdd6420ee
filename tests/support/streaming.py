"""Local steps whose parameters are exchanged in fragments, in plain PyTorch, after a trace.

    Delta_f = w_f - w_f,i     at update v, f = v mod F; the last update of an epoch is of all
    w_f <- outer(w_f, mean)   and what a worker goes on with is w_f, or a part of it and of its own

The fragments are found by trying all; the trace gives the pushes and their order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import torch

from paceline.events import Apply, EpochEnd, Joined, Ticket
from paceline.trace.records import Handed, Heard, Ordered, Record
from paceline.verification.plain import Order, State, fresh, state_of
from paceline.workloads.base import Task
from reference import average
from runs import leases_of


@dataclass(frozen=True)
class OuterStep:
    """The outer step of one run, computed by its formula."""

    lr: float = 1.0
    momentum: float = 0.0
    is_nesterov: bool = False


def names_of_fragments(task: Task, num_fragments: int) -> list[list[str]]:
    """Contiguous in the model's order, with the largest fragment as small as possible."""
    named = [(name, one.nbytes) for name, one in fresh(task)[0].named_parameters()]
    fragments: list[list[tuple[str, int]]] = [named]
    least = sum(size for _, size in named) + 1
    for cuts in combinations(range(1, len(named)), num_fragments - 1):
        parts = [named[a:b] for a, b in zip((0, *cuts), (*cuts, len(named)), strict=True)]
        largest = max(sum(size for _, size in part) for part in parts)
        if largest <= least:  # among equals the one with the longest first fragments
            least, fragments = largest, parts
    return [[name for name, _ in part] for part in fragments]


def last_updates(records: Sequence[Record]) -> set[int]:
    """The updates after which an epoch ends."""
    result, version = set(), 0
    for record in records:
        if isinstance(record, Ordered) and isinstance(record.order, Apply):
            version += 1
        elif isinstance(record, Ordered) and isinstance(record.order, EpochEnd):
            result.add(version - 1)
    return result


class Streamed:
    """One run, computed again.

    Args:
        num_workers: members that there were in all.
        fragments: names of parameters.
        overlap: own steps after which what came is merged, by halves; 0: taken over at once.
    """

    def __init__(
        self,
        task: Task,
        num_workers: int,
        fragments: list[list[str]],
        outer: OuterStep,
        overlap: int = 0,
    ) -> None:
        self.overlap = overlap
        self.late: dict[int, State] = {}
        self.task, self.fragments, self.outer = task, fragments, outer
        model, _ = fresh(task)
        self.names = [name for name, _ in model.named_parameters()]
        self.state = state_of(model)
        self.velocity: State = {}
        self.own = [fresh(task) for _ in range(num_workers)]
        self.held = [dict(self.state) for _ in self.own]
        self.order = Order(task)

    def run(self, records: Sequence[Record]) -> State:
        """The parameters after its last update."""
        leases = leases_of(one.order for one in records if isinstance(one, Ordered))
        last, version = last_updates(records), 0
        moved: dict[Ticket, State] = {}
        for record in records:
            if isinstance(record, Handed):
                ticket = record.fact.ticket
                due = self._due(version, last)
                batches = [self.order.batch(lease) for lease in leases[ticket[:2]]]
                moved[ticket] = self._steps(ticket.member, batches)
                if not self.overlap:
                    self._hand_in(ticket.member, due)
            elif isinstance(record, Heard) and isinstance(record.fact, Joined):
                self.held[record.fact.member] = dict(self.state)
            elif isinstance(record, Ordered) and isinstance(record.order, Apply):
                tickets, weights = record.order
                self._update([moved[one] for one in tickets], weights, self._due(version, last))
                version += 1
        return self.state

    def _due(self, version: int, last: set[int]) -> list[str]:
        return self.names if version in last else self.fragments[version % len(self.fragments)]

    def _steps(self, member: int, batches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> State:
        model, optimizer = self.own[member]
        model.load_state_dict(self.held[member])
        late = self.late.pop(member, {})
        for number, (inputs, targets) in enumerate(batches, start=1):
            optimizer.zero_grad()
            self.task.loss(model(inputs), targets).backward()
            optimizer.step()
            if number == min(self.overlap, len(batches)):
                with torch.no_grad():
                    for name, parameter in model.named_parameters():
                        if name in late:
                            parameter.copy_((parameter + late[name]) / 2)
        self.held[member] = state_of(model)
        return dict(self.held[member])

    def _hand_in(self, member: int, due: list[str]) -> None:
        """If it is asked again before the update, it starts from the global fragment."""
        self._give(member, {name: self.state[name] for name in due})

    def _give(self, member: int, values: State) -> None:
        for name, same in self.own[member][0].named_parameters(remove_duplicate=False):
            first = next(
                one for one, other in self.own[member][0].named_parameters() if other is same
            )
            if first in values:
                self.held[member][name] = values[first].clone()

    def _update(self, pushes: Sequence[State], weights: Sequence[float], due: list[str]) -> None:
        mean, outer = average(pushes, weights), self.outer
        state = {**self.state, **{k: v for k, v in mean.items() if not self._is_parameter(k)}}
        for name in due:
            delta = self.state[name] - mean[name]
            self.velocity[name] = outer.momentum * self.velocity.get(name, 0.0 * delta) + delta
            step = self.velocity[name]
            if outer.is_nesterov:
                step = delta + outer.momentum * self.velocity[name]
            state[name] = self.state[name] - outer.lr * step
        for name, same in self._tied():
            state[name] = state[same]
        self.state = state
        for member in range(len(self.own)):
            new = {name: state[name] for name in due}
            if self.overlap and due is not self.names:
                self.late[member] = new
            else:
                self._give(member, new)
            for name in state:
                if not self._is_parameter(name):
                    self.held[member][name] = state[name].clone()

    def _is_parameter(self, name: str) -> bool:
        model = self.own[0][0]
        return name in {one for one, _ in model.named_parameters(remove_duplicate=False)}

    def _tied(self) -> list[tuple[str, str]]:
        model = self.own[0][0]
        first = {id(one): name for name, one in model.named_parameters()}
        every = model.named_parameters(remove_duplicate=False)
        return [(name, first[id(one)]) for name, one in every if name != first[id(one)]]
