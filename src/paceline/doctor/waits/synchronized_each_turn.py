"""The host synchronizes with the device in each iteration.

Nothing can be queued while it waits; only a measurement needs it, such as one that reads a clock.

Fix: leave it out, or time with events (torch.cuda.Event(enable_timing=True)).
Source: PyTorch CUDA semantics, "Asynchronous execution".
"""

import re
from collections.abc import Iterable, Iterator

import libcst as cst

from ..examples import STEP, looped
from ..facts import Facts
from ..findings import Severity
from ..iteration import TrainingTurn, always_reached, turns
from ..mends import remove_statement
from ..rule import Found, ScriptRule

_DEVICE_CALLS = {"torch.cuda.synchronize", "torch.mps.synchronize", "torch.xpu.synchronize",
                 "torch.accelerator.synchronize"}  # fmt: skip
_CLOCK = re.compile(
    r"(^|\.)(perf_counter|monotonic|process_time|thread_time)(_ns)?$|^time\.time(_ns)?$|^timeit\.|"
    r"datetime\.(now|utcnow)$|(^|\.)cuda\.Event$|elapsed_time$|[Tt]imer"
)


def check(facts: Facts) -> Iterator[Found]:
    timed = {node for turn in turns(facts) for node in _timed(facts, turn)}
    for node in () if _has_timer(facts) else always_reached(facts):
        if isinstance(node, cst.Call) and _waits(facts, node) and node not in timed:
            yield Found(node, f"{facts.code(node)} in each iteration")


def _waits(facts: Facts, call: cst.Call) -> bool:
    """Whether a call waits for a device, or for its current stream."""
    owner = facts.owner(call) if facts.method(call) == "synchronize" else None
    is_stream = isinstance(owner, cst.Call) and facts.meaning(owner) == "torch.cuda.current_stream"
    return is_stream or facts.meaning(call) in _DEVICE_CALLS


def _timed(facts: Facts, turn: TrainingTurn) -> list[cst.CSTNode]:
    """Return all that a turn reaches if any of it reads a clock, or else nothing."""
    blocks = facts.flow.reached([turn.loop.body])
    nodes = [node for block in blocks for node in facts.script.within(block)]
    return nodes if _reads_clock(facts, nodes) else []


def _has_timer(facts: Facts) -> bool:
    """Whether a class of the script reads a clock, and does not itself train."""
    loops = {turn.loop for turn in turns(facts)}
    classes = [list(facts.script.within(node)) for node in facts.flow.classes.values()]
    return any(_reads_clock(facts, nodes) and loops.isdisjoint(nodes) for nodes in classes)


def _reads_clock(facts: Facts, nodes: Iterable[cst.CSTNode]) -> bool:
    return any(isinstance(node, cst.Call) and _CLOCK.search(facts.meaning(node)) for node in nodes)


RULE = ScriptRule.of(
    __name__, __doc__, Severity.COST, check,
    sick=(looped([*STEP, "torch.cuda.synchronize()"]), looped([*STEP, "torch.cuda.current_stream().synchronize()"])),
    healthy=(
        looped(after="torch.cuda.synchronize()"),
        looped(["start = time.perf_counter()", *STEP, "torch.cuda.synchronize()", "seconds.append(time.perf_counter() - start)"], before="import time\nseconds = []"),
        looped(["start = now()", *STEP, "seconds.append(now() - start)"], before="from time import time\ndef now():\n    torch.cuda.synchronize()\n    return time()\nseconds = []"),
        looped(["begin.record()", *STEP, "end.record()", "torch.cuda.synchronize()", "seconds.append(begin.elapsed_time(end))"], before="begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)\nseconds = []"),
        looped(["with Timed():", *(f"    {line}" for line in STEP), "    torch.cuda.synchronize()"], before="import time\nclass Timed:\n    def __enter__(self):\n        self.start = time.time()\n    def __exit__(self, *_):\n        print(time.time() - self.start)"),
    ),
    mend=remove_statement,
)  # fmt: skip
