"""A protocol's name on the command line: accepted spellings, and messages for others."""

import pytest

from paceline.errors import ConfigError
from paceline.protocols import ALIASES, parse, with_number


def test_the_number_means_what_the_name_says() -> None:
    assert parse("k-sync:3", 4).num_pushes == 3
    assert parse("local-sgd:8", 4).num_steps == 8
    assert parse("local-sgd:8", 4).num_pushes == 4
    assert parse("full-sync", 4).num_pushes == 4
    assert parse("stale-synchronous:3", 4).num_pushes == 1


def test_more_pushes_than_workers_are_allowed_where_one_may_push_twice() -> None:
    assert parse("k-batch-sync:9", 2).num_pushes == 9
    assert parse("k-batch-async:9", 2).num_pushes == 9


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_alternative_names_are_accepted(alias: str, name: str) -> None:
    number = with_number(name, 2).removeprefix(name)
    assert str(parse(alias + number, 2)) == name + number


@pytest.mark.parametrize(
    ("text", "num_workers", "message"),
    [
        ("k-sync:0", 2, "k-sync:K needs K >= 1 (pushes an update), got k-sync:0; try k-sync:1"),
        (
            "k-sync:5",
            4,
            "k-sync:K needs K <= 4, the number of workers, got k-sync:5; try k-sync:4, or "
            "k-batch-sync:5, where one worker may push more than once per update",
        ),
        (
            "k-async:5",
            4,
            "k-async:K needs K <= 4, the number of workers, got k-async:5; try k-async:4, or "
            "k-batch-async:5, where one worker may push more than once per update",
        ),
        (
            "k-sync",
            4,
            "k-sync:K needs a whole number K (pushes an update), got nothing in 'k-sync'; "
            "write for example k-sync:2",
        ),
        (
            "local-sgd:many",
            4,
            "local-sgd:H needs a whole number H (local steps between two averages), got 'many' in "
            "'local-sgd:many'; write for example local-sgd:2",
        ),
        (
            "post-local-sgd:8",
            4,
            "post-local-sgd:N,H needs whole numbers N (updates with one step of each worker) and "
            "H (local steps between two averages), got '8' in 'post-local-sgd:8'; write for "
            "example post-local-sgd:2,2",
        ),
        (
            "post-local-sgd:8,0",
            4,
            "post-local-sgd:N,H needs H >= 1 (local steps between two averages), got "
            "post-local-sgd:8,0; try post-local-sgd:8,1",
        ),
        (
            "local-sgd:2,3",
            4,
            "local-sgd:H needs a whole number H (local steps between two averages), got '2,3' in "
            "'local-sgd:2,3'; write for example local-sgd:2",
        ),
        ("full-sync:3", 4, "full-sync takes no number, got 'full-sync:3'; write full-sync"),
        (
            "ssp:-1",
            2,
            "stale-synchronous:S needs S >= 0 (steps of lead over the slowest), "
            "got stale-synchronous:-1; try stale-synchronous:0",
        ),
        ("full-sync", 0, "workers must be >= 1, got 0"),
    ],
)
def test_an_invalid_spelling_is_refused_with_the_valid_ones(
    text: str, num_workers: int, message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        parse(text, num_workers)
    assert str(error.value) == message


def test_an_unknown_name_is_answered_with_the_nearest_and_all() -> None:
    with pytest.raises(ConfigError, match=r"unknown protocol 'k-snyc'; did you mean 'k-sync'\?"):
        parse("k-snyc:2", 2)
    with pytest.raises(ConfigError, match="stale-synchronous"):
        parse("zebra", 2)
