"""The words that peers taught people, and ours: translated, or answered.

It also finds where our flags end: ``paceline launch`` leaves everything from the script's name on
to the script. This module must not know what a flag means.
"""

from collections.abc import Mapping, Sequence

from ..config import NAMES, TYPES, flag_of
from ..errors import ConfigError, unknown

ALIASES: Mapping[str, str] = {
    "--num-processes": "--workers",
    "--num-workers": "--workers",
    "--nproc-per-node": "--workers",
    "--np": "--workers",
    "-n": "--workers",
    "--learning-rate": "--lr",
    "--sync": "--protocol",
    "--strategy": "--protocol",
}
"""Spellings of the same thing; with ``_`` for ``-`` they are understood, too."""

_ONE_MACHINE = (
    "paceline launch starts the workers of this machine only, and takes their number as "
    "--workers N; it has no engine for several machines"
)
ANSWERS: Mapping[str, str] = {
    "--gpus": "paceline counts workers, one a GPU: use --workers N --device cuda "
    "(left out, they are all GPUs that are seen)",
    "--gpu": "use --device cuda:N for one GPU, or --workers N --device cuda for N of them",
    "--num-nodes": _ONE_MACHINE,
    "--nnodes": _ONE_MACHINE,
    "--node-rank": _ONE_MACHINE,
    "--backend": "how bytes move follows from the device; to choose a way use --path store or "
    "--path peers",
    "--steps": "a worker's steps and the run's updates differ: use --updates N for updates",
    "--max-steps": "a worker's steps and the run's updates differ: use --updates N for updates",
}
"""Flags that mean something else here: what to say to them."""

_SWITCHES = frozenset(flag_of(name) for name in NAMES if TYPES[name] is bool) | {"--help", "-h"}
"""Flags of ``launch`` that take no value."""
_VALUED = frozenset(flag_of(name) for name in NAMES if TYPES[name] is not bool) | {"--config"}


def translate(tokens: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our own tokens in our own words, and those that are the script's (from ``--`` on).

    Raises:
        ConfigError: a flag means something else here, or ``launch`` is given an unknown one.
    """
    if tokens and tokens[0] == "launch":
        own, rest = _split(tokens[1:])
        return ["launch", *own], rest
    return [_ours(token) for token in tokens], []


def _ours(token: str) -> str:
    """One token in our words; a value that is no flag stays as it is."""
    flag, equals, value = token.partition("=")
    spelled = flag.replace("_", "-") if flag.startswith("--") else flag
    if spelled in ANSWERS:
        raise ConfigError(f"there is no {flag}: {ANSWERS[spelled]}")
    return ALIASES.get(spelled, spelled) + equals + value


def _split(tokens: Sequence[str]) -> tuple[list[str], list[str]]:
    """The flags of ``launch`` itself, and from the script's name on what is the script's."""
    own: list[str] = []
    i = 0
    while i < len(tokens):
        token = _ours(tokens[i])
        if token == "-m":
            return [*own, "--module"], ["--", *tokens[i + 1 :]]
        if token == "--":
            return own, ["--", *tokens[i + 1 :]]
        if not token.startswith("-"):
            return own, ["--", *tokens[i:]]
        flag, equals, _ = token.partition("=")
        name = flag.replace("--no-", "--", 1)
        if name not in _SWITCHES and flag not in _VALUED:
            raise unknown("flag", flag, _SWITCHES | _VALUED | {"-m"}, "before the script's name")
        own.append(token)
        if flag in _VALUED and not equals and i + 1 < len(tokens):
            i += 1
            own.append(tokens[i])
        i += 1
    return own, []
