"""The measured cost of a message."""

from paceline.splits.clocks import measure_loopback


def test_loopback_latency_and_byte_time_are_plausible() -> None:
    link = measure_loopback()
    assert 0.0 < link.latency_s < 0.1
    assert 0.0 < link.s_per_byte < 1e-6
