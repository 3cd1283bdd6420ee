"""Join operations that must stay together into pieces, in an order in which they can be computed.

    a result that is no tensor   joins its readers: sizes, tuples
    an in-place operation        joins all that wrote or read, before it, the memory it changes
    a layer with buffers         joins all its calls, where it is called more than once
    a cycle                      pieces that would then wait for one another become one

Which operation changes which memory is found by running all of them once, on an example. Pieces
that share a parameter are not joined: a cut between them has a price (`partition`).
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
    """Run the operations once, and join those that must stay together."""

    def __init__(self, graph_module: fx.GraphModule) -> None:
        super().__init__(graph_module, garbage_collect_values=False)
        self._nodes: list[fx.Node] = [
            node
            for node in graph_module.graph.nodes
            if node.op in ("call_module", "call_function", "call_method")
        ]
        self._parents: dict[fx.Node, fx.Node] = {node: node for node in self._nodes}  # union-find
        self._users: dict[int, set[fx.Node]] = {}  # memory address -> its writers and readers
        self._alive: list[Tensor] = []  # so that no address is reused

    def run_node(self, n: fx.Node) -> Any:
        before = [(tensor, tensor._version) for tensor in self._inputs_of(n)]
        result = super().run_node(n)
        for tensor, version in before:
            self._users.setdefault(_address(tensor), set()).add(n)
            if tensor._version != version:  # n changed it; later readers get the changed tensor
                self._join_all(self._users[_address(tensor)])
        if n.op == "get_attr":
            return result
        for leaf in torch.utils._pytree.tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._alive.append(leaf)
                self._users.setdefault(_address(leaf), set()).add(n)
        if n in self._parents and not isinstance(result, Tensor):
            for user in n.users:
                self._join(n, user)
        return result

    def _inputs_of(self, node: fx.Node) -> list[Tensor]:
        """Return the tensors that a node reads, parameters and buffers left out."""
        if node.op == "output":
            return []
        values = (
            self.env.get(source) for source in node.all_input_nodes if source.op != "get_attr"
        )
        leaves = (leaf for value in values for leaf in torch.utils._pytree.tree_leaves(value))
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def _join(self, node: fx.Node, other: fx.Node) -> None:
        if node in self._parents and other in self._parents:
            self._parents[self._root(other)] = self._root(node)

    def _root(self, node: fx.Node) -> fx.Node:
        while self._parents[node] is not node:
            node = self._parents[node]
        return node

    def in_order(self) -> tuple[tuple[fx.Node, ...], ...]:
        """Return the pieces, in an order in which they can be computed."""
        self._join_all_calls_with_buffers()
        while True:
            members: dict[fx.Node, list[fx.Node]] = {}
            for node in self._nodes:
                members.setdefault(self._root(node), []).append(node)
            needs = {
                root: {
                    self._root(source)
                    for node in nodes
                    for source in node.all_input_nodes
                    if source in self._parents
                }
                - {root}
                for root, nodes in members.items()
            }
            try:
                graphlib.TopologicalSorter(needs).prepare()
            except graphlib.CycleError as error:
                self._join_all(error.args[1])
                continue
            return tuple(tuple(members[root]) for root in self._sorted_roots(members, needs))

    def _join_all(self, nodes: Iterable[fx.Node]) -> None:
        operations = [node for node in nodes if node in self._parents]
        for node, other in itertools.pairwise(operations):
            self._join(node, other)

    def _join_all_calls_with_buffers(self) -> None:
        calls: dict[str, list[fx.Node]] = {}
        for node in self._nodes:
            if node.op == "call_module":
                layer = self.fetch_attr(str(node.target))
                if any(True for _ in layer.buffers()):
                    calls.setdefault(str(node.target), []).append(node)
        for nodes in calls.values():
            self._join_all(nodes)

    def _sorted_roots(
        self, members: dict[fx.Node, list[fx.Node]], needs: dict[fx.Node, set[fx.Node]]
    ) -> list[fx.Node]:
        """Sort pieces topologically; of those that are ready, the earliest first operation wins.

        Args:
            members: operations of each piece, by its root.
            needs: roots of the pieces that each piece needs, by its root.
        """
        index = {node: number for number, node in enumerate(self._nodes)}
        readers: dict[fx.Node, list[fx.Node]] = {root: [] for root in members}
        for root, needed_roots in needs.items():
            for needed in needed_roots:
                readers[needed].append(root)
        num_missing = {root: len(needed_roots) for root, needed_roots in needs.items()}
        root_at = {index[nodes[0]]: root for root, nodes in members.items()}
        ready = [number for number, root in root_at.items() if not num_missing[root]]
        heapq.heapify(ready)
        order = []
        while ready:
            root = root_at[heapq.heappop(ready)]
            order.append(root)
            for reader in readers[root]:
                num_missing[reader] -= 1
                if not num_missing[reader]:
                    heapq.heappush(ready, index[members[reader][0]])
        return order


def _address(tensor: Tensor) -> int:
    """Return the address of a tensor's memory; an empty tensor has one of its own."""
    if tensor.is_meta:
        return int(tensor.untyped_storage()._cdata)
    return tensor.untyped_storage().data_ptr() or id(tensor)


def label(node: fx.Node) -> str:
    """Return the name of an operation: its layer's, its function's, or ``.method``."""
    if node.op == "call_module":
        return str(node.target)
    if node.op == "call_method":
        return f".{node.target}"
    if node.target is operator.getitem:
        return "[]"
    name = getattr(node.target, "__name__", str(node.target))
    return name.split(".")[0]


def place(node: fx.Node) -> str:
    """Return the name of an operation after the submodule that it is in: ``blocks.0.add``."""
    if node.op == "call_module":
        return str(node.target)
    stack = list(node.meta.get("nn_module_stack", {}).values())
    inside = str(stack[-1][0]).removeprefix("L['self']").strip(".") if stack else ""
    return f"{inside}.{label(node).lstrip('.')}" if inside else label(node)
