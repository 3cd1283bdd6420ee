"""What a message costs here."""

from paceline.splits.clocks import measure_loopback


def test_a_message_takes_some_time_and_so_does_a_byte() -> None:
    link = measure_loopback()
    assert 0.0 < link.latency_s < 0.1
    assert 0.0 < link.s_per_byte < 1e-6
