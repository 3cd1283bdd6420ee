"""docs/compression.md: a section for each compressor, and what bench/compression.py measured."""

import importlib
import inspect

from paceline import compression
from paceline.fields import spelled

from .parts import RESULTS, indented

HEAD = """\
# Fewer bytes: `--compress`

Made from the docstrings in `src/paceline/compression/` by `docs/generate.py`; edit those.

    torchrun --nproc-per-node 2 train.py          with PACELINE_COMPRESS=int8
    paceline train mlp --workers 2 --path collective --compress topk:1%

Where `torch.distributed` carries gradients (engine torchrun, and path `collective`), workers send
less than they have computed; under local-sgd, less of their differences of parameters. What one has
not sent is not lost: it is added to its next gradient (error feedback). It is in checkpoints: as
many workers as before go on with their own, another number with the sum of all, in the first. A
worker without a mini-batch sends what it had left. It takes two numbers a parameter in memory, of
float32, or float64 where the gradient is that. All workers come to the same bits. Buffers (of
batch norm) are sent whole; an update that is not finite changes nothing of what was left; clips
act on the mean that has come.

Everywhere else it is refused by name: workers that share memory send nothing, so fewer bytes win
nothing; the asynchronous protocols go through that memory, too.

n numbers of s bytes (4, or 8 of float64), P workers; k numbers, R columns.

"""


SAID = """\
## When it wins

Where the link is slow: what it saves there has to be more than what encoding and decoding take on
the processor that computes the gradients. Few set-ups are so (Agarwal et al., MLSys 2022). So it is
priced before the run: every worker encodes and decodes gradients of this model's own size, and all
of them together time what an exchange takes. Where whole gradients take less than 50 ms, both ways
are measured as they are, in turn: on such a link bytes tell little (gloo takes longer to add up 16
bits than 32). Elsewhere what bytes take is reckoned from two sizes of an all-reduce. The plan says

    compress  int8: 22.2 MiB -> 5.6 MiB that a worker sends an update; compressing loses here:
              82.2 ms saved, 669 ms spent (link: 212.2 MB/s, 64 us a message, measured)

A dry run has one worker, so the link is not known to it. The verdict is of an update as if nothing
overlapped. Under torchrun each bucket is encoded, and its first operation begins, while the
backward pass computes the next one; encoding competes with it for the same cores. The summary says
what a worker sent, and the first line of the trace has the price.
"""


def page() -> str:
    """docs/compression.md."""
    rows = [
        "| `--compress` | what is sent | bytes that a worker sends an update |",
        "|---|---|---|",
    ]
    for name, one in compression.COMPRESSORS.items():
        rows.append(f"| `{spelled(name, one.arguments)}` | {one.summary} | {one.sends} |")
    rows.append("| `none` | all of it | 2 (P-1)/P sn |")
    parts = [HEAD + "\n".join(rows) + "\n", SAID, measured()]
    modules = dict.fromkeys(
        f"{one.made_by.partition(':')[0]}" for one in compression.COMPRESSORS.values()
    )
    for module in modules:
        text = inspect.getdoc(importlib.import_module(f"paceline.compression.{module}")) or ""
        path = f"[`compression/{module}.py`](../src/paceline/compression/{module}.py)"
        parts.append("\n".join([f"## {path}", "", *indented(text), ""]))
    return "\n".join(parts)


def measured() -> str:
    """What bench/compression.py has measured, and its command."""
    path = RESULTS / "compression.md"
    if not path.is_file():
        return "`python bench/compression.py --write` measures both, beside what runs take.\n"
    _, _, measured = path.read_text().partition("\n")
    return f"## Measured\n{measured}"
