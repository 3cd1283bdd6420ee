"""What is compared bit for bit computes with as many threads: one, as `runs.train` has it."""

import pytest


@pytest.fixture(autouse=True)
def _as_many_threads(one_thread: None) -> None:
    """Inline runs put back what they set."""
