"""A network of five layers over four learners: which connections are bold, and where to cut.

python examples/13_five_layers.py                                                the numbers
cd examples && paceline partition 13_five_layers:network -n 4 --input 1,8        measured here

Each layer has eight neurons. A connection between neurons of two learners is bold: its value is
sent over the network. A good partition has few bold connections and equally many neurons for each
learner, so densely connected neurons belong together. If each neuron sees only its neighbours in
the layer below, that is a column of neurons; if it sees all of them, all ways are about as good.

Source: J. Dean et al., "Large Scale Distributed Deep Networks", NeurIPS 2012, figure 1.
"""

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from paceline.collectives.base import LinkCost
from paceline.partition.brute_force import try_all_cuts
from paceline.partition.graph import chain
from paceline.partition.pipeline import Pipeline, workers
from paceline.partition.placement import even_cut
from paceline.partition.search import find_placement

if TYPE_CHECKING:
    from torch import nn

LAYERS, NEURONS, LEARNERS = 5, 8, 4
LOCAL, DENSE = 1, NEURONS
"""The reach of a neuron in the layer below, to each side."""

WAYS: dict[str, Callable[[int, int], int]] = {
    "over layers": lambda layer, neuron: max(0, layer - 1),
    "over neurons": lambda layer, neuron: neuron * LEARNERS // NEURONS,
    "both, 2 x 2": lambda layer, neuron: 2 * (layer >= LAYERS // 2) + (neuron >= NEURONS // 2),
}


def bold(learner_of: Callable[[int, int], int], reach: int) -> int:
    """Return the number of connections between neurons of different learners."""
    return sum(
        learner_of(layer, source) != learner_of(layer + 1, target)
        for layer in range(LAYERS - 1)
        for target in range(NEURONS)
        for source in range(max(0, target - reach), min(NEURONS, target + reach + 1))
    )


def network() -> "nn.Module":
    """Return the dense network as a module: (B, 8) -> (B, 8)."""
    from torch import nn

    return nn.Sequential(*(nn.Linear(NEURONS, NEURONS) for _ in range(LAYERS)))


def main() -> None:
    print(f"{'way':<14}{'neurons each':<16}{'bold, local':>12}{'bold, dense':>13}")
    for name, learner_of in WAYS.items():
        places = [(layer, neuron) for layer in range(LAYERS) for neuron in range(NEURONS)]
        shares = Counter(learner_of(*place) for place in places)
        each = " ".join(str(shares[learner]) for learner in range(LEARNERS))
        print(f"{name:<14}{each:<16}{bold(learner_of, LOCAL):>12}{bold(learner_of, DENSE):>13}")

    print("\nAs a pipeline, its layers taking 3, 1, 1, 1 and 3 ms, 8 micro-batches:")
    layers = chain("abcde", seconds=[3e-3, 1e-3, 1e-3, 1e-3, 3e-3], num_bytes=4 * NEURONS)
    link = LinkCost(latency_s=10e-6, s_per_byte=1e-9)
    pipeline = Pipeline(workers=workers(LEARNERS), link=link, micro_batches=8)
    best = try_all_cuts(layers, pipeline)
    assert best is not None
    cuts = {
        "even": even_cut(layers, pipeline),
        "found": find_placement(layers, pipeline).placement,
        "best of all": best,
    }
    for name, cut in cuts.items():
        parts = " | ".join("".join(layers.nodes[i].name for i in part.nodes) for part in cut.parts)
        print(f"{name:<14}{parts:<16}{cut.step_s * 1e3:>9.2f} ms, balance {cut.balance:.2f}")


if __name__ == "__main__":
    main()
