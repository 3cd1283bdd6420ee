"""A growing trace: each line is read once, and only when it is complete."""

from pathlib import Path

from paceline.trace import Trace, read_trace
from paceline.trace.following import FollowedTrace


def test_each_line_is_read_once_and_only_when_complete(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "trace.jsonl")
    trace.header(task="lenet", protocol="async", workers=1)
    trace.joined(0.5, 0, 0, 11)
    trace.note(1.0, "a sentence")
    trace.end(8.0, "finished")
    trace.close()
    whole = trace.path.read_bytes()
    path = tmp_path / "growing.jsonl"
    path.touch()
    results = []
    with FollowedTrace(path) as followed:
        assert list(followed.new()) == []
        for start in range(0, len(whole), 7):
            with open(path, "ab") as file:
                file.write(whole[start : start + 7])
            results += followed.new()
        assert list(followed.new()) == []
    assert results == list(read_trace(trace.path))
