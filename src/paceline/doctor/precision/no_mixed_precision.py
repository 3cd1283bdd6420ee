"""A network computes in 32 bits, without autocast.

Tensor cores work on 16 bits; if the device has them, matrix products may be several times as fast.
Whether that is a gain here has to be measured: small networks are limited by other things.

Fix: with torch.autocast(device.type, dtype=torch.bfloat16): around model and loss.
Source: PyTorch performance tuning guide, "Use mixed precision and AMP".
"""

import re
from collections.abc import Iterator

from ..facts import Facts
from ..findings import Severity
from ..rule import Found, ScriptRule

_PRECISION_TOOLS = re.compile(
    r"autocast|\bamp\b|bfloat16|float16|\.half\(|precision|fp16|bf16|Trainer\b|GradScaler|Accelerator"
)


def check(facts: Facts) -> Iterator[Found]:
    if _PRECISION_TOOLS.search(facts.uncommented):
        return
    call = next(facts.forward_calls(), None)
    if call is not None:
        yield Found(call, f"{facts.code(call.func)}(...) computes in 32 bits, without autocast")


RULE = ScriptRule.of(
    __name__, __doc__, Severity.NOTE, check,
    sick=("import torch\nmodel = torch.nn.Linear(16, 8)\nmodel(torch.randn(8, 16))\n",),
    healthy=(
        "import torch\nmodel = torch.nn.Linear(16, 8)\n"
        "with torch.autocast('cuda', dtype=torch.bfloat16):\n    model(torch.randn(8, 16))\n",
    ),
)  # fmt: skip
