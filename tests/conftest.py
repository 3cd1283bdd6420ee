"""For all tests: live runs of one test process share a nursery, so that torch is imported once.

How a run begins by itself is tested where runs are commands: tests/cli, tests/faults.
"""

from collections.abc import Iterator

import pytest

from paceline.engines.cradle import warm


@pytest.fixture(scope="session", autouse=True)
def warm_nursery() -> Iterator[None]:
    with warm():
        yield
