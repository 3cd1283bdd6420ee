"""The outer optimizer's spelling: what is accepted, where it is allowed, the messages."""

import pytest

from paceline.errors import ConfigError
from paceline.protocols import PROTOCOLS, parse, split_names, with_number
from paceline.protocols.outer import AVERAGING, parse_outer


def test_the_outer_optimizer_is_a_setting_or_a_suffix() -> None:
    written = parse("local-sgd:8+nesterov:0.7,0.9", 2)
    given = parse("local-sgd:8", 2, outer="nesterov:0.7,0.9")
    assert written.outer == given.outer == parse_outer("nesterov:0.7,0.9")
    assert str(written) == str(given) == "local-sgd:8+nesterov:0.7,0.9"
    assert str(parse(str(given), 2)) == str(given)
    assert parse("local-sgd:8", 2).outer is AVERAGING


def test_two_spellings_of_the_outer_optimizer_must_agree() -> None:
    assert str(parse("local-sgd:8+sgd:0.5", 2, outer="sgd:0.5")) == "local-sgd:8+sgd:0.5"
    with pytest.raises(ConfigError, match="names an outer optimizer, but sgd:1 is set too"):
        parse("local-sgd:8+sgd:0.5", 2, outer="sgd:1")


@pytest.mark.parametrize("name", PROTOCOLS)
def test_an_outer_optimizer_is_refused_where_gradients_are_pushed(name: str) -> None:
    text = with_number(name, 2)
    if PROTOCOLS[name].update_rule == "mean":
        assert parse(text, 2, outer="momentum:1,0.5").outer.momentum == 0.5
        return
    with pytest.raises(ConfigError) as error:
        parse(text, 2, outer="nesterov:0.7,0.9")
    assert str(error.value) == (
        f"outer nesterov:0.7,0.9 steps on the mean change of local steps, but under "
        f"{text} workers push gradients, on which your own optimizer steps; leave it out, or use "
        "--protocol local-sgd:H or post-local-sgd:N,H or adaptive-local:H"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "nesterov:x",
            "outer nesterov:LR,B needs two numbers, the learning rate LR > 0 and the momentum "
            "0 < B < 1, got 'nesterov:x'; write for example nesterov:0.7,0.9",
        ),
        (
            "nesterov:0.7",
            "outer nesterov:LR,B needs two numbers, the learning rate LR > 0 and the momentum "
            "0 < B < 1, got 'nesterov:0.7'; write for example nesterov:0.7,0.9",
        ),
        (
            "momentum:0.7,1",
            "outer momentum:LR,B needs two numbers, the learning rate LR > 0 and the momentum "
            "0 < B < 1, got 'momentum:0.7,1'; write for example momentum:1,0.5",
        ),
        (
            "sgd:-1",
            "outer sgd:LR needs a number, the learning rate LR > 0, got 'sgd:-1'; write for "
            "example sgd:1",
        ),
        (
            "sgd:nan",
            "outer sgd:LR needs a number, the learning rate LR > 0, got 'sgd:nan'; write for "
            "example sgd:1",
        ),
        ("none:1", "outer none takes no number, got 'none:1'; write for example none"),
    ],
)
def test_an_invalid_outer_optimizer_is_refused_with_the_valid_forms(
    text: str, message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        parse_outer(text)
    assert str(error.value) == message


def test_an_unknown_name_is_answered_with_the_nearest_and_all() -> None:
    with pytest.raises(ConfigError, match=r"unknown outer optimizer 'nestrov'.*nesterov:LR,B"):
        parse_outer("nestrov:0.7,0.9")


@pytest.mark.parametrize("text", ["sgd:0.5", "momentum:1e-05,0.25", "nesterov:0.1234567891,0.9"])
def test_a_written_outer_optimizer_is_read_again(text: str) -> None:
    assert str(parse_outer(text)) == text


def test_a_list_with_commas_keeps_the_numbers_of_one_name_together() -> None:
    text = "full-sync, local-sgd:8+nesterov:.7,.9,post-local-sgd:100,8,async"
    assert split_names(text) == (
        "full-sync", "local-sgd:8+nesterov:.7,.9", "post-local-sgd:100,8", "async",
    )  # fmt: skip
