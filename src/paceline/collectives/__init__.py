"""The table of collectives by name, and the parser of the names on the command line.

    transfers       the vocabulary: transfers, rounds, operations
    base            the contract of a member, and the cost of a message

    rings           ring, bidirectional-ring; several rings at once, as a search finds them
    trees           tree, double-tree
    direct          hub, fully-connected
    butterflies     halving-doubling, bine
    hierarchical    rings within hosts and between them
    straggler       straggler-aware: the other ranks begin without the late one

    proof           runs a schedule on sets of contributors, and on plain numbers
    topology        links between ranks and switches; topologies of known machines
    cost            a schedule's seconds and bytes per rank on a topology
    host            a schedule's seconds between processes of one machine, from measured rounds
    crossings       the sizes at which one collective overtakes another, measured and predicted
    optimum         the least time that a topology allows, over all its cuts
    ring_search     the best rings in a topology, one or several at once
    choose          the fastest member for a buffer's size, and where another one takes over

A new collective is a file here, or a section in the file of a related one, and one line in the
table; the tests in tests/collectives run over the table. How the members of a run exchange bytes
while they train is another family, `exchange/`, whose averagings may follow these schedules.
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
    """Return how a collective is written: ``ring``, ``hierarchical:G``, ``hub[:R]``."""
    return spelled(name, _numbers(name))


def _numbers(name: str) -> tuple[NameNumber, ...]:
    argument = COLLECTIVES[name].argument
    return () if argument is None else (argument,)


def parse(text: str, num_ranks: int) -> Collective:
    """Return the collective that ``name`` or ``name:number`` stands for.

    Args:
        num_ranks: the ranks that take part.

    Raises:
        ConfigError: the name is unknown; its number is missing, not a number, or out of range; or
            the collective does not work for this many ranks.

    Example:
        >>> str(parse("hierarchical:4", num_ranks=8))
        'hierarchical:4'
        >>> str(parse("star", num_ranks=3))
        'hub'
    """
    numbers = {name: _numbers(name) for name in COLLECTIVES}
    name, values = read_name(text, "collective", numbers, ALIASES)
    return COLLECTIVES[name](num_ranks, *values)
