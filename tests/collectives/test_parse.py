"""The name of a collective on the command line: accepted spellings and error messages."""

import pytest

from paceline.collectives import ALIASES, COLLECTIVES, parse, spelling
from paceline.collectives.base import LinkCost
from paceline.collectives.transfers import Operation
from paceline.errors import ConfigError


@pytest.mark.parametrize("name", COLLECTIVES)
def test_parsed_name_is_printed_unchanged(name: str) -> None:
    argument = COLLECTIVES[name].argument
    text = name if argument is None else f"{name}:1"
    assert str(parse(text, 4)) == text
    if argument is not None and argument.default is not None:
        assert str(parse(name, 4)) == name
        assert parse(name, 4).value == argument.default
        assert spelling(name) == f"{name}[:{argument.symbol}]"


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_names_used_by_other_libraries_are_accepted(alias: str, name: str) -> None:
    number = ":1" if "[" not in spelling(name) and ":" in spelling(name) else ""
    assert str(parse(alias + number, 2)) == name + number


@pytest.mark.parametrize(
    ("text", "num_ranks", "said"),
    [
        ("rings", 4, "unknown collective 'rings'; did you mean 'ring'?"),
        ("ring:2", 4, "ring takes no number, got 'ring:2'; write ring"),
        (
            "hierarchical",
            4,
            "hierarchical:G needs a whole number G (ranks in a host, side by side), got nothing "
            "in 'hierarchical'; write for example hierarchical:1",
        ),
        (
            "hierarchical:3",
            8,
            "hierarchical:3 needs a multiple of 3 ranks, got 8; try hierarchical:2, or ring",
        ),
        (
            "hierarchical:0",
            8,
            "hierarchical:G needs G >= 1 (ranks in a host, side by side), got hierarchical:0; "
            "try hierarchical:1",
        ),
        ("hub:4", 4, "hub:R needs R < 4, the number of ranks, got hub:4; try hub:3"),
        ("hub:", 4, "hub[:R] needs a whole number R (rank of the server), got nothing in 'hub:'"),
        (
            "straggler-aware:9",
            8,
            "straggler-aware:R needs R < 8, the number of ranks, got straggler-aware:9; "
            "try straggler-aware:7",
        ),
        (
            "double-tree:few",
            8,
            "double-tree[:M] needs a whole number M (segments that each tree's half is cut into), "
            "got 'few' in 'double-tree:few'; write for example double-tree:1",
        ),
        ("ring", 0, "a collective needs at least 1 rank, got 0"),
    ],
)
def test_unfit_collective_is_refused_with_alternatives(
    text: str, num_ranks: int, said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text, num_ranks)
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize(
    ("text", "operation", "root", "said"),
    [
        (
            "halving-doubling",
            Operation.REDUCE_SCATTER,
            0,
            "the reduce-scatter of halving-doubling needs a power of two ranks, got 6; 4 and 8 "
            "fit, or take ring",
        ),
        (
            "bine",
            Operation.BROADCAST,
            0,
            "the broadcast of bine needs a power of two ranks, got 6; 4 and 8 fit, or take tree",
        ),
        (
            "ring",
            Operation.BROADCAST,
            0,
            "ring has no broadcast; it has all-reduce, reduce-scatter, all-gather",
        ),
        ("tree", Operation.BROADCAST, 6, "root must be a rank from 0 to 5, got 6"),
    ],
)
def test_unsupported_operation_is_refused(
    text: str, operation: Operation, root: int, said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text, 6).rounds(operation, root)
    assert str(caught.value) == said


def test_negative_link_latency_is_refused() -> None:
    with pytest.raises(ConfigError, match="latency_s of a link must be at least 0 and finite"):
        LinkCost(latency_s=-1.0, s_per_byte=0.0)
