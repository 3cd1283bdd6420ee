"""Training does not end if nobody reads its output."""

import errno
import fcntl
import io
import os
import resource
import sys
from pathlib import Path

import pytest

from paceline.system.streams import Lasting, Tail, open_standard_streams, wait_for


class Full(io.StringIO):
    """A file on a full disk."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_write_error_is_reported_once_and_not_raised() -> None:
    told: list[str] = []
    out = Lasting(Full(), told.append)
    assert out.trouble == ""
    for _ in range(3):
        assert out.write("words") == 5
    assert told == [out.trouble] == ["No space left on device"]


def test_ascii_terminal_gets_escaped_characters() -> None:
    raw = io.BytesIO()
    out = Lasting(io.TextIOWrapper(raw, encoding="ascii"))
    out.write("\u03c4 = 3\n")
    out.flush()
    assert raw.getvalue() == b"\\u03c4 = 3\n"
    assert not out.trouble


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_printed_results_are_escaped_for_an_ascii_terminal(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, name, io.TextIOWrapper(raw, encoding="ascii"))
    open_standard_streams()
    print("\u00fc.py, \udcff.py", file=getattr(sys, name), flush=True)
    assert raw.getvalue() == b"\\xfc.py, \\udcff.py\n"


def test_log_is_shown_in_whole_lines_and_completely_at_the_end(tmp_path: Path) -> None:
    first, second = tmp_path / "0.log", tmp_path / "1.log"
    shown: list[str] = []
    tail = Tail((first, second), shown.append)
    tail.show()  # no log exists yet
    first.write_text("one\ntw")
    tail.show()
    assert shown == ["one\n"]
    second.write_text("before it was followed\n")
    tail.follow(1)
    with second.open("a") as log:
        log.write("three")
    tail.show(is_last=True)
    assert shown == ["one\n", "tw", "three"]


def test_wait_for_supports_descriptors_beyond_those_of_select() -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] <= 2000:
        pytest.skip("this process may not open so many")
    reader, writer = os.pipe()
    high = fcntl.fcntl(reader, fcntl.F_DUPFD, 2000)
    try:
        assert wait_for([high], timeout_s=0.0) == set()
        assert wait_for([high], [writer], 0.0) == {writer}
        os.write(writer, b"x")
        assert wait_for([high], timeout_s=5.0) == {high}
    finally:
        for one in (reader, writer, high):
            os.close(one)
