"""Tests of the measuring verbs compute for real."""

import pytest


@pytest.fixture(autouse=True)
def _alone(one_thread: None) -> None:
    """Every test here computes in one thread."""
