"""The cost of bytes: computed by hand, and refusals of invalid rates."""

import math

import pytest

from paceline.conditions.world import Link, LinkQueue, parse_bytes, parse_link
from paceline.errors import ConfigError


def test_a_transfer_takes_the_slower_links_time_and_the_latency() -> None:
    own = LinkQueue(Link(num_bytes=1e6, latency_s=0.5, bytes_per_s=1e6, server_bytes_per_s=1e7))
    assert own.there_s(2.0) == pytest.approx(2.0 + 1.0 + 0.5)
    server = LinkQueue(Link(num_bytes=1e6, latency_s=0.5, bytes_per_s=1e7, server_bytes_per_s=1e6))
    assert server.there_s(2.0) == pytest.approx(2.0 + 1.0 + 0.5)


def test_the_server_serves_one_transfer_after_the_other() -> None:
    link = LinkQueue(Link(num_bytes=1e6, server_bytes_per_s=1e6))
    assert [link.there_s(0.0) for _ in range(3)] == [1.0, 2.0, 3.0]
    assert link.there_s(10.0) == 11.0, "it was free again"


def test_separate_links_do_not_wait_for_each_other() -> None:
    link = LinkQueue(Link(num_bytes=1e6, bytes_per_s=1e6))
    assert [link.there_s(0.0) for _ in range(3)] == [1.0, 1.0, 1.0]


def test_links_are_read() -> None:
    assert parse_link(None, None, None) is None
    assert parse_link("1ms", None, None) == Link(num_bytes=0.0, latency_s=1e-3)
    assert parse_link("1ms,100MB/s", "1Gbit/s", 5e5) == Link(
        num_bytes=5e5, latency_s=1e-3, bytes_per_s=1e8, server_bytes_per_s=1.25e8
    )
    assert parse_link(None, "1GB/s", 1.0).bytes_per_s == math.inf  # type: ignore[union-attr]
    assert parse_bytes("516.5 kB") == 516_500


@pytest.mark.parametrize(
    ("link", "server", "said"),
    [
        ("100MB/s", None, "link '100MB/s'.*is not a time"),
        ("1ms,100MB", None, "'100MB' is not a rate; write it as in 100MB/s"),
        ("1ms,fast/s", None, "'fast' is not a number of bytes"),
        (None, "0MB/s", "a rate must be > 0"),
        (None, "1XB/s", "'1XB' is not a number of bytes.*kB, MB, GB"),
        ("1ms,-1MB/s", None, "'-1MB' is not a number of bytes"),
        (f"1ms,{10**400}B/s", None, "is not a number of bytes"),
    ],
)
def test_an_invalid_link_is_refused_by_name(
    link: str | None, server: str | None, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_link(link, server, 1e6)


def test_a_rate_needs_the_bytes_of_a_push() -> None:
    with pytest.raises(ConfigError, match="needs the bytes of a push: give --bytes"):
        parse_link("1ms,1MB/s", None, None)
