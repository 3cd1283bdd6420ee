"""docs/protocols.md: a section for each protocol, from the docstring of its file."""

import inspect
from pathlib import Path

from paceline.protocols import ALIASES, PROTOCOLS, outer, spelling, streaming
from paceline.protocols.base import SyncProtocol
from paceline.protocols.outer import SPELLINGS as OUTERS

from .parts import indented, said_of

HEAD = """\
# The protocols

Made from the docstrings in `src/paceline/protocols/` by `docs/generate.py`; edit those. How to add
one: [add-a-protocol.md](add-a-protocol.md).

P is the number of workers, K the pushes that an update averages, X the time of one step; `X_{K:P}`
is the K-th fastest of P. In the drawings a line `|` is an update and time runs to the right.

"""


STREAMING_NOTES = """\
Every path computes the same (`tests/equivalences/test_fragments.py`). The cost of an exchange is
hidden where `torch.distributed` carries the bytes, under torchrun and on path `collective`: the sum
of a fragment starts at the boundary and is waited for O steps later; with a compressor the first
operation is waited for after half of them, and the second one starts. Workers still meet at each
boundary, for a few hundred bytes, so they wait for a slow worker. In shared memory, through the
store and between peers, an exchange is a copy, and ends before any worker continues. In virtual
time a link is waited for after O steps; measured times (`--like`) have no link to hide.

H has to be a multiple of F, O below H/F, and the model must have F parameters, since a fragment
consists of whole parameters; anything else is refused before the first step. So are a stream (the
end of a pass is not known in advance), one worker, and `--overlap` with `--nonfinite skip` where
the sum runs while workers continue. A push is weighted by the samples of its last H/F steps. A
worker without a mini-batch in the last update of an epoch adds nothing to it. `step.skip()`, and
mini-batches that a loop accumulates by itself in place of `--accumulate`, are refused: the last
update would be missed. A loop that is left by `break` ends its epoch with an update of one
fragment, so changes to the others since their last exchange are dropped. `pace.stop()` and Ctrl-C
between peers lose nothing; through the store a worker whose step is cancelled continues from the
global copy.
"""


def page() -> str:
    """docs/protocols.md."""
    sections = [section(name, protocol) for name, protocol in PROTOCOLS.items()]
    return HEAD + table() + "\n" + "\n".join([*sections, outer_section(), streaming_section()])


def table() -> str:
    """All protocols, a row each."""
    rows = ["| `--protocol` | an update | also called |", "|---|---|---|"]
    for name, protocol in PROTOCOLS.items():
        also = ", ".join(f"`{alias}`" for alias, meant in ALIASES.items() if meant == name)
        rows.append(f"| `{spelling(name)}` | {protocol.summary} | {also} |")
    return "\n".join(rows) + "\n"


def section(name: str, protocol: type[SyncProtocol]) -> str:
    """One protocol: what it needs, as data, and its part of the docstring of its file."""
    text = said_of(name, protocol, PROTOCOLS)
    path = Path(inspect.getfile(protocol)).name
    facts = [
        "cancels work" if protocol.cancels else "never cancels work",
        "between peers or through the store" if protocol.is_spmd else "through the store",
    ]
    for argument in reversed(protocol.arguments):
        limit = ", at most the workers" if argument.is_at_most_workers else ""
        meaning = f"{argument.symbol}: {argument.meaning}, at least {argument.minimum}{limit}"
        facts.insert(0, meaning)
    lines = [
        f"## `{spelling(name)}`",
        "",
        f"[`protocols/{path}`](../src/paceline/protocols/{path}): {'; '.join(facts)}.",
        "",
        *indented(text),
        "",
    ]
    return "\n".join(lines)


def outer_section() -> str:
    """The outer optimizer, which is a setting of the protocols with local steps."""
    names = [spelling(name) for name, kind in PROTOCOLS.items() if kind.update_rule == "mean"]
    lines = [
        "## `--outer`",
        "",
        "[`protocols/outer.py`](../src/paceline/protocols/outer.py): "
        f"{', '.join(OUTERS.values())}; under {', '.join(f'`{name}`' for name in names)}. "
        "Of one protocol alone: `local-sgd:8+nesterov:0.7,0.9`.",
        "",
        *indented(inspect.getdoc(outer) or ""),
        "",
    ]
    return "\n".join(lines)


def streaming_section() -> str:
    """Fragments and overlap, which are settings of the protocols whose H stays."""
    names = [spelling(name) for name, kind in PROTOCOLS.items() if kind.can_stream]
    lines = [
        "## `--fragments` and `--overlap`",
        "",
        "[`protocols/streaming.py`](../src/paceline/protocols/streaming.py): "
        f"`--fragments F --overlap O`; under {', '.join(f'`{name}`' for name in names)}. "
        "Of one protocol alone: `local-sgd:8+fragments:4,1`.",
        "",
        *indented(inspect.getdoc(streaming) or ""),
        "",
        STREAMING_NOTES,
    ]
    return "\n".join(lines)
