"""Fragments: spellings and refusals."""

import pytest

from paceline.errors import ConfigError
from paceline.protocols import parse
from paceline.protocols.streaming import Streaming


@pytest.mark.parametrize(
    "text", ["local-sgd:8+fragments:4", "local-sgd:8+nesterov:0.7,0.9+fragments:4,1"]
)
def test_a_protocol_with_fragments_is_read_as_it_is_written(text: str) -> None:
    protocol = parse(text, 2)
    assert str(protocol) == text
    assert protocol.num_steps == 2
    assert parse(text, 2, streaming=protocol.streaming).streaming == protocol.streaming


@pytest.mark.parametrize(
    ("text", "workers", "words"),
    [
        ("local-sgd:8+fragments:3", 2, "8 local steps of local-sgd:8 cannot be divided by 3"),
        ("local-sgd:8+fragments:3", 2, "use --fragments 2 or 4 or 8, or --protocol local-sgd:9"),
        ("local-sgd:8+fragments:4,2", 2, "overlap must be below the 2 local steps .*--overlap 1"),
        ("local-sgd:8+fragments:1,8", 2, "overlap must be below the 8 .*in 1 fragment, got 8"),
        ("full-sync+fragments:2", 2, "under full-sync workers push gradients; leave --fragments"),
        ("post-local-sgd:3,8+fragments:2", 2, "H changes.* or use --protocol local-sgd:H$"),
        ("adaptive-local:8+fragments:2", 2, "H changes"),
        ("local-sgd:8+fragments:2", 1, "needs workers that exchange .* there is only one"),
        ("local-sgd:8+fragments:x", 2, "takes one or two whole numbers, got 'fragments:x'"),
        ("local-sgd:8+fragments:0", 2, "fragments must be >= 1, got 0"),
        ("local-sgd:8+fragments:2,-1", 2, "overlap must be >= 0, got -1"),
    ],
)
def test_invalid_fragments_are_refused_with_the_valid_forms(
    text: str, workers: int, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        parse(text, workers)


def test_two_settings_of_fragments_are_refused() -> None:
    with pytest.raises(ConfigError, match="names fragments, but fragments:4 is set too"):
        parse("local-sgd:8+fragments:2", 2, streaming=Streaming(num_fragments=4))
