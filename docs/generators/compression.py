"""docs/compression.md: a section for each compressor, and the figures of bench/compression.py."""

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
fewer bytes than they have computed; under local-sgd this applies to their differences of
parameters. What a worker has not sent is not lost: it is added to its next gradient (error
feedback). Checkpoints contain it: with the same number of workers each continues with its own; with
another number the first worker gets the sum of all. A worker without a mini-batch sends what it had
left. It takes two numbers per parameter in memory, float32, or float64 where the gradient is that.
All workers get the same bits. Buffers (of batch norm) are sent whole. An update that is not finite
leaves the remainder unchanged. Clips apply to the mean after decoding.

Everywhere else it is refused by name: workers that share memory send nothing, so fewer bytes save
nothing; the asynchronous protocols go through that memory, too.

n numbers of s bytes (4, or 8 for float64), P workers; k numbers, R columns.

"""


WHEN_IT_WINS = """\
## When it wins

On a slow link: it has to save more time there than encoding and decoding take on the processor that
computes the gradients. Few set-ups are like that (Agarwal et al., MLSys 2022). So it is priced
before the run: every worker encodes and decodes gradients of this model's own size, and all of them
together time an exchange. If whole gradients take less than 50 ms, both ways are measured directly,
in turn: on such a link the number of bytes says little (gloo takes longer to add up 16 bits than
32). Otherwise the time is computed from two sizes of an all-reduce. The plan says

    compress  int8: 22.2 MiB -> 5.6 MiB that a worker sends an update; compressing loses here:
              82.2 ms saved, 669 ms spent (link: 212.2 MB/s, 64 us a message, measured)

A dry run has one worker, so it does not know the link. The verdict assumes an update without any
overlap. Under torchrun each bucket is encoded, and its first operation begins, while the
backward pass computes the next one; encoding competes with it for the same cores. The summary shows
what a worker sent, and the first line of the trace has the price.
"""


def page() -> str:
    """Return docs/compression.md."""
    rows = [
        "| `--compress` | what is sent | bytes that a worker sends per update |",
        "|---|---|---|",
    ]
    for name, kind in compression.COMPRESSORS.items():
        rows.append(f"| `{spelled(name, kind.arguments)}` | {kind.summary} | {kind.sends} |")
    rows.append("| `none` | all of it | 2 (P-1)/P sn |")
    parts = [HEAD + "\n".join(rows) + "\n", WHEN_IT_WINS, measured()]
    modules = dict.fromkeys(
        f"{kind.made_by.partition(':')[0]}" for kind in compression.COMPRESSORS.values()
    )
    for module in modules:
        text = inspect.getdoc(importlib.import_module(f"paceline.compression.{module}")) or ""
        path = f"[`compression/{module}.py`](../src/paceline/compression/{module}.py)"
        parts.append("\n".join([f"## {path}", "", *indented(text), ""]))
    return "\n".join(parts)


def measured() -> str:
    """Return the figures of bench/compression.py, with its command."""
    path = RESULTS / "compression.md"
    if not path.is_file():
        return "`python bench/compression.py --write` measures both, beside the time of runs.\n"
    _, _, figures = path.read_text().partition("\n")
    return f"## Measured\n{figures}"
