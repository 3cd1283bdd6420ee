"""Graphs to cut: random ones and a few fixed ones."""

import random

from paceline.collectives.base import LinkCost
from paceline.partition.graph import INPUT, TiedParameter, WorkEdge, WorkGraph, WorkNode
from paceline.partition.pipeline import Pipeline, PipelineWorker


def random_graph(draw: random.Random, num_nodes: int) -> WorkGraph:
    """Each node reads one or two earlier ones, mostly near; some parameters are tied."""
    nodes = tuple(
        WorkNode(
            name=f"n{i}",
            forward_s=draw.choice([0.0, 1.0, 2.0, draw.uniform(0.1, 5.0)]),
            backward_s=draw.uniform(0.0, 6.0),
            first_s=draw.choice([0.0, draw.uniform(0.0, 3.0)]),
            parameter_bytes=draw.randrange(0, 1000),
            activation_bytes=draw.randrange(0, 500),
            late_s=draw.choice([0.0, 0.0, draw.uniform(0.0, 3.0)]),
            late_bytes=draw.choice([0, 0, draw.randrange(400)]),
            buffer_bytes=draw.choice([0, 0, 64]),
            num_layers=draw.choice([0, 1, 1, 2]),
        )
        for i in range(num_nodes)
    )
    readers: dict[int, set[int]] = {}
    for i in range(num_nodes):
        for _ in range(draw.choice([1, 2, 2])):
            near = max(INPUT, i - 1 - draw.choice([0, 0, 0, 0, 1, 2, 5]))
            readers.setdefault(near, set()).add(i)
    for i in range(num_nodes):
        readers.setdefault(i, {num_nodes})  # unread nodes are outputs
    edges = tuple(
        WorkEdge(
            name=f"e{source}",
            source=source,
            targets=tuple(sorted(targets)),
            num_bytes=draw.randrange(1, 400),
            gradient_bytes=0 if source == INPUT else draw.choice([0, draw.randrange(1, 400)]),
        )
        for source, targets in readers.items()
    )
    ties = ()
    if num_nodes > 3 and draw.random() < 0.3:
        tied = tuple(sorted(draw.sample(range(num_nodes), 2)))
        ties = (TiedParameter(name="tied", num_bytes=draw.randrange(1, 800), nodes=tied),)
    return WorkGraph(nodes=nodes, edges=edges, ties=ties)


def random_pipeline(draw: random.Random, num_parts: int) -> Pipeline:
    speeds = draw.choice([[1.0], [1.0, 0.5], [1.0, 1.0, 0.3, 2.0]])
    return Pipeline(
        workers=tuple(
            PipelineWorker(
                speed=draw.choice(speeds), memory_bytes=draw.choice([None, None, 12_000])
            )
            for _ in range(num_parts)
        ),
        link=LinkCost(
            latency_s=draw.choice([0.0, 0.1, 1.0]), s_per_byte=draw.choice([0.0, 0.001, 0.01])
        ),
        micro_batches=draw.choice([1, 2, 4, 8]),
        schedule=draw.choice(["gpipe", "1f1b"]),
        state_copies=draw.choice([0, 1, 2]),
        keeps_ties=draw.random() < 0.3,
    )
