"""Requests to stop by a signal: repeated, and immediate."""

import os
import signal
import time

import pytest

from paceline.system import signals
from paceline.system.signals import SignalInterrupt, ended_by_signals


def test_repeated_signal_counts_once_and_a_later_one_interrupts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``timeout`` sends it to its child and then to the child's process group."""
    monkeypatch.setattr(signals, "_SAME_S", 0.05)
    requests: list[int] = []

    def stop_softly(number: int) -> bool:
        requests.append(number)
        return len(requests) == 1

    with ended_by_signals(stop_softly):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert requests == [signal.SIGTERM]
        time.sleep(0.1)
        with pytest.raises(SignalInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
    assert requests == [signal.SIGTERM] * 2
