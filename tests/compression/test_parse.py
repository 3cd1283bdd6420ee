"""The name of a compressor on the command line: accepted spellings and error messages."""

import pytest

from paceline.compression import parse
from paceline.errors import ConfigError


@pytest.mark.parametrize(
    "text",
    [
        "fp16",
        "bf16",
        "int8",
        "int4",
        "topk:1%",
        "topk:0.01%",
        "topk:12.5%",
        "topk:100%",
        "powersgd:4",
    ],
)
def test_parsed_name_is_printed_unchanged(text: str) -> None:
    assert str(parse(text)) == text


def test_none_is_no_compression() -> None:
    assert parse("none") is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "int7",
            "unknown compressor 'int7'; did you mean 'int8'? "
            "Known: bf16, fp16, int4, int8, none, powersgd, topk",
        ),
        ("int8:4", "int8 takes no number, got 'int8:4'; write int8"),
        ("none:1", "none takes no number, got 'none:1'; write none"),
        (
            "powersgd:0",
            "powersgd:R needs R >= 1 (rank of what is sent of a matrix), got powersgd:0; "
            "try powersgd:2",
        ),
        (
            "powersgd",
            "powersgd:R needs a whole number R (rank of what is sent of a matrix), got nothing in "
            "'powersgd'; write for example powersgd:2",
        ),
        *(
            (
                text,
                "topk:S% needs a percentage S% (of the gradient's numbers are sent, above 0% and "
                f"at most 100%), got {(text[5:] and repr(text[5:])) or 'nothing'} in {text!r}; "
                "write for example topk:1%",
            )
            for text in (
                "topk", "topk:", "topk:0%", "topk:200%", "topk:0.01", "topk:few", "topk:-1%",
                "topk:nan%", "topk:inf%", "topk:1%%", "topk:0.00001%",
            )
        ),
    ],
)  # fmt: skip
def test_invalid_name_is_refused_with_alternatives(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert str(caught.value) == said
