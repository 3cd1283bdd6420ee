"""Uses of an iteration number: to report progress, or in a computation."""

import libcst as cst
import pytest

from paceline.porting.dataflow import Flow
from paceline.porting.tree import SourceTree
from paceline.porting.uses import uses

SCRIPT = """\
def note(step, total):
    print(step)
def keep(step, total):
    seen[step] = total
for it in range(100):
    {}
"""


@pytest.mark.parametrize(
    ("line", "tells"),
    [
        ("print(it)", [True]),
        ("if it % 10 == 0: writer.add_scalar('loss', 1.0, it)", [True, True]),
        ("lr = 0.1 * it / 100", [True]),
        ("group['lr'] = 0.1 / (it + 1)", [True]),
        ("x = batches[it]", [False]),
        ("total += it", [False]),
        ("note(it, 100)", [True, True]),  # here, and in the function that prints it
        ("keep(it, 100)", [True, False]),
        ("it += 1", []),
    ],
)
def test_uses_of_the_iteration_number_are_classified(line: str, tells: list[bool]) -> None:
    flow = Flow(SourceTree(SCRIPT.format(line)))
    loop = next(one for one in flow.script.within(flow.script.module) if isinstance(one, cst.For))
    assert [said for _, said in uses(flow, "it", loop.body)] == tells
