"""The collectives by name, and how a name on the command line becomes one.

    transfers       the words: transfers, rounds, operations
    base            the contract of a member, and what a message costs

    rings           ring, bidirectional-ring; several rings at once, as they are found
    trees           tree, double-tree
    direct          hub, fully-connected
    butterflies     halving-doubling, bine
    hierarchical    rings within hosts and between them
    straggler       straggler-aware: the others begin without the one that is late

    proof           a schedule on sets of contributors, and on plain numbers
    topology        links between ranks and switches; machines that were recorded
    cost            a schedule on a topology: seconds, and bytes a rank
    optimum         the least that a topology allows, by all its cuts
    ring_search     the rings in a topology, several at once
    choose          which member is the fastest for so many bytes, and where another takes over

A new collective is a file here, or a section in that of its sister, and one line in the table; the
tests in tests/collectives run over the table. How members exchange bytes while they train is
another family: `exchange/`, whose averagings may follow a schedule of these.
"""

from ..fields import NameNumber, read_name, spelled
from .base import Collective
from .butterflies import BineButterfly, HalvingDoubling
from .direct import FullyConnected, HubServer
from .hierarchical import HierarchicalRings
from .rings import BidirectionalRing, RingAllReduce
from .straggler import StragglerAware
from .trees import BinomialTree, DoubleTree

COLLECTIVES: dict[str, type[Collective]] = {
    "ring": RingAllReduce,
    "bidirectional-ring": BidirectionalRing,
    "tree": BinomialTree,
    "double-tree": DoubleTree,
    "hub": HubServer,
    "fully-connected": FullyConnected,
    "halving-doubling": HalvingDoubling,
    "bine": BineButterfly,
    "hierarchical": HierarchicalRings,
    "straggler-aware": StragglerAware,
}

ALIASES = {
    "binomial": "tree",
    "direct": "fully-connected",
    "parameter-server": "hub",
    "rabenseifner": "halving-doubling",
    "star": "hub",
    "stragglar": "straggler-aware",
}


def spelling(name: str) -> str:
    """How a collective of the table is written: ``ring``, ``hierarchical:G``, ``hub[:R]``."""
    return spelled(name, _numbers(name))


def _numbers(name: str) -> tuple[NameNumber, ...]:
    argument = COLLECTIVES[name].argument
    return () if argument is None else (argument,)


def parse(text: str, num_ranks: int) -> Collective:
    """The collective that ``name`` or ``name:number`` means.

    Args:
        num_ranks: that take part.

    Raises:
        ConfigError: the name is unknown, its number is missing, not one, or out of its range, or it
            is not for so many ranks.

    Example:
        >>> str(parse("hierarchical:4", num_ranks=8))
        'hierarchical:4'
        >>> str(parse("star", num_ranks=3))
        'hub'
    """
    name, values = read_name(
        text, "collective", {one: _numbers(one) for one in COLLECTIVES}, ALIASES
    )
    return COLLECTIVES[name](num_ranks, *values)
