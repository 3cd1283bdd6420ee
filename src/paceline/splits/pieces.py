"""Pieces: operations that stay together, numbered in an order in which they can be computed.

    a result that is no tensor   with whoever reads it: sizes, tuples
    an in-place operation        with all that made or read, before it, the memory it changes
    a layer with buffers         with itself, where it is called twice
    a circle                     what these rules leave waiting for one another is one piece

What changes what is seen by running the operations once, on an example. A parameter that several
pieces use does not join them: a cut between them is priced (`partition`).
"""

import graphlib
import heapq
import itertools
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx


class Pieces(fx.Interpreter):
    """Runs the operations once and joins those that must stay together."""

    def __init__(self, graph_module: fx.GraphModule) -> None:
        super().__init__(graph_module, garbage_collect_values=False)
        self._nodes: list[fx.Node] = [
            node
            for node in graph_module.graph.nodes
            if node.op in ("call_module", "call_function", "call_method")
        ]
        self._joined: dict[fx.Node, fx.Node] = {node: node for node in self._nodes}
        self._memory: dict[int, set[fx.Node]] = {}  # who makes or reads it, by its address
        self._alive: list[Tensor] = []  # so that no address is used again

    def run_node(self, n: fx.Node) -> Any:
        before = [(one, one._version) for one in self._tensors_of(n)]
        result = super().run_node(n)
        for one, version in before:
            self._memory.setdefault(_address(one), set()).add(n)
            if one._version != version:  # who reads it later is given what it is then
                self._join_all(self._memory[_address(one)])
        if n.op == "get_attr":
            return result
        for one in torch.utils._pytree.tree_leaves(result):
            if isinstance(one, Tensor):
                self._alive.append(one)
                self._memory.setdefault(_address(one), set()).add(n)
        if n in self._joined and not isinstance(result, Tensor):
            for user in n.users:
                self._join(n, user)
        return result

    def _tensors_of(self, node: fx.Node) -> list[Tensor]:
        if node.op == "output":
            return []
        values = (self.env.get(one) for one in node.all_input_nodes if one.op != "get_attr")
        leaves = (one for value in values for one in torch.utils._pytree.tree_leaves(value))
        return [one for one in leaves if isinstance(one, Tensor)]

    def _join(self, one: fx.Node, other: fx.Node) -> None:
        if one in self._joined and other in self._joined:
            self._joined[self._root(other)] = self._root(one)

    def _root(self, node: fx.Node) -> fx.Node:
        while self._joined[node] is not node:
            node = self._joined[node]
        return node

    def found(self) -> tuple[tuple[fx.Node, ...], ...]:
        """The pieces, in their order."""
        self._join_all_calls_with_buffers()
        while True:
            members: dict[fx.Node, list[fx.Node]] = {}
            for node in self._nodes:
                members.setdefault(self._root(node), []).append(node)
            needs = {
                root: {
                    self._root(one)
                    for node in nodes
                    for one in node.all_input_nodes
                    if one in self._joined
                }
                - {root}
                for root, nodes in members.items()
            }
            try:
                graphlib.TopologicalSorter(needs).prepare()
            except graphlib.CycleError as error:
                self._join_all(error.args[1])
                continue
            return tuple(tuple(members[root]) for root in self._ordered(members, needs))

    def _join_all(self, nodes: Iterable[fx.Node]) -> None:
        ours = [node for node in nodes if node in self._joined]
        for one, other in itertools.pairwise(ours):
            self._join(one, other)

    def _join_all_calls_with_buffers(self) -> None:
        calls: dict[str, list[fx.Node]] = {}
        for node in self._nodes:
            if node.op == "call_module":
                called = self.fetch_attr(str(node.target))
                if any(True for _ in called.buffers()):
                    calls.setdefault(str(node.target), []).append(node)
        for nodes in calls.values():
            self._join_all(nodes)

    def _ordered(
        self, members: dict[fx.Node, list[fx.Node]], needs: dict[fx.Node, set[fx.Node]]
    ) -> list[fx.Node]:
        """Of the pieces that could be next always the one whose first operation is the earliest."""
        place = {node: number for number, node in enumerate(self._nodes)}
        readers: dict[fx.Node, list[fx.Node]] = {root: [] for root in members}
        for root, needed in needs.items():
            for one in needed:
                readers[one].append(root)
        left = {root: len(needed) for root, needed in needs.items()}
        first = {place[nodes[0]]: root for root, nodes in members.items()}
        ready = [number for number, root in first.items() if not left[root]]
        heapq.heapify(ready)
        order = []
        while ready:
            root = first[heapq.heappop(ready)]
            order.append(root)
            for reader in readers[root]:
                left[reader] -= 1
                if not left[reader]:
                    heapq.heappush(ready, place[members[reader][0]])
        return order


def _address(tensor: Tensor) -> int:
    """Of its memory; a tensor without one is alone in it."""
    if tensor.is_meta:
        return int(tensor.untyped_storage()._cdata)
    return tensor.untyped_storage().data_ptr() or id(tensor)


def label(node: fx.Node) -> str:
    """What an operation is called: its layer's name, or its function's."""
    if node.op == "call_module":
        return str(node.target)
    if node.op == "call_method":
        return f".{node.target}"
    if node.target is operator.getitem:
        return "[]"
    name = getattr(node.target, "__name__", str(node.target))
    return name.split(".")[0]


def place(node: fx.Node) -> str:
    """An operation with the submodule that it stands in: ``blocks.0.add``."""
    if node.op == "call_module":
        return str(node.target)
    stack = list(node.meta.get("nn_module_stack", {}).values())
    inside = str(stack[-1][0]).removeprefix("L['self']").strip(".") if stack else ""
    return f"{inside}.{label(node).lstrip('.')}" if inside else label(node)
