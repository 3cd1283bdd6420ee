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
    for node in always_reached(facts):
        if isinstance(node, cst.Call) and _waits(facts, node) and node not in timed:
            yield Found(node, f"{facts.code(node)} in each iteration")


def _waits(facts: Facts, call: cst.Call) -> bool:
    """Whether a call waits for a device, or for its current stream."""
    owner = facts.owner(call) if facts.method(call) == "synchronize" else None
    is_stream = isinstance(owner, cst.Call) and facts.meaning(owner) == "torch.cuda.current_stream"
    return is_stream or facts.meaning(call) in _DEVICE_CALLS


def _timed(facts: Facts, turn: TrainingTurn) -> list[cst.CSTNode]:
    """Return all that a turn reaches if it, or a class that it uses, reads a clock; else nothing."""
    blocks = facts.flow.reached([turn.loop.body])
    nodes = [node for block in blocks for node in facts.script.within(block)]
    within = [list(facts.script.within(used)) for used in _classes(facts, nodes)]
    reads = [part for parts in within if turn.loop not in parts for part in parts]
    return nodes if _reads_clock(facts, [*nodes, *reads]) else []


def _classes(facts: Facts, nodes: list[cst.CSTNode]) -> list[cst.ClassDef]:
    """Return the script's classes of which nodes make objects, or use those made elsewhere."""
    makers = [node for node in nodes if isinstance(node, cst.Call)]
    for node in nodes:
        origins = facts.flow.origins(node) if isinstance(node, cst.Name | cst.Attribute) else ()
        makers += [origin for origin in origins if isinstance(origin, cst.Call)]
    classes = facts.flow.classes
    names = dict.fromkeys(facts.meaning(maker) for maker in makers)
    return [classes[name] for name in names if name in classes]


def _reads_clock(facts: Facts, nodes: Iterable[cst.CSTNode]) -> bool:
    return any(isinstance(node, cst.Call) and _CLOCK.search(facts.meaning(node)) for node in nodes)


RULE = ScriptRule.of(
    __name__, __doc__, Severity.COST, check,
    sick=(looped([*STEP, "torch.cuda.synchronize()"]), looped([*STEP, "torch.cuda.current_stream().synchronize()"]),
          looped([*STEP, "torch.cuda.synchronize()"], before="import time\nclass Log:\n    def write(self, text):\n        print(time.time(), text)\nlog = Log()", after="log.write(epoch)")),
    healthy=(
        looped(after="torch.cuda.synchronize()"),
        looped(["start = time.perf_counter()", *STEP, "torch.cuda.synchronize()", "seconds.append(time.perf_counter() - start)"], before="import time\nseconds = []"),
        looped(["start = now()", *STEP, "seconds.append(now() - start)"], before="from time import time\ndef now():\n    torch.cuda.synchronize()\n    return time()\nseconds = []"),
        looped(["begin.record()", *STEP, "end.record()", "torch.cuda.synchronize()", "seconds.append(begin.elapsed_time(end))"], before="begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)\nseconds = []"),
        looped(["with Timed():", *(f"    {line}" for line in STEP), "    torch.cuda.synchronize()"], before="import time\nclass Timed:\n    def __enter__(self):\n        self.start = time.time()\n    def __exit__(self, *_):\n        print(time.time() - self.start)"),
        looped([*STEP, "torch.cuda.synchronize()", "laps.end()"], before="import time\nclass Laps:\n    def end(self):\n        print(time.time())\nlaps = Laps()"),
    ),
    mend=remove_statement,
)  # fmt: skip
