"""A damaged file is refused with one sentence that names it."""

from pathlib import Path

import pytest

from paceline.data.catalogue import read_checked
from paceline.errors import ConfigError


def _path(tiny, *, compress: bool) -> Path:
    folder = tiny.root / "tiny"
    tiny.put(folder, compress=compress)
    return folder / ("train-images.gz" if compress else "train-images")


@pytest.mark.parametrize("compress", [False, True])
def test_intact_files_are_read_whole(tiny, compress: bool) -> None:
    content = read_checked(_path(tiny, compress=compress), tiny.data_set.train_images, "")
    assert bytes(content) == tiny.contents["train-images"]


def test_writing_to_the_content_leaves_the_file_unchanged(tiny) -> None:
    path = _path(tiny, compress=False)
    content = read_checked(path, tiny.data_set.train_images, "")
    content[0] = 99
    assert path.read_bytes() == tiny.contents["train-images"]


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("keep_bytes", [0, 1, 20, -1])
def test_truncated_files_are_refused(tiny, compress: bool, keep_bytes: int) -> None:
    path = _path(tiny, compress=compress)
    path.write_bytes(path.read_bytes()[:keep_bytes])
    with pytest.raises(ConfigError) as caught:
        read_checked(path, tiny.data_set.train_images, "fetch it anew")
    message = str(caught.value)
    assert message.startswith(f"{path} is damaged: expected 80 bytes with md5")
    assert tiny.data_set.train_images.md5 in message
    assert message.endswith("; fetch it anew")


def test_a_changed_byte_is_refused_with_both_checksums(tiny) -> None:
    path = _path(tiny, compress=False)
    content = bytearray(path.read_bytes())
    content[40] ^= 1
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"expected 80 bytes with md5 \w{32}.*found md5 \w{32};"):
        read_checked(path, tiny.data_set.train_images, "fetch it anew")


def test_an_oversized_gzip_file_is_not_read_to_its_end(tiny) -> None:
    import gzip

    path = _path(tiny, compress=True)
    path.write_bytes(gzip.compress(tiny.contents["train-images"] + bytes(10_000_000)))
    with pytest.raises(ConfigError, match="found more than 80 bytes"):
        read_checked(path, tiny.data_set.train_images, "fetch it anew")


def test_an_html_page_instead_of_a_gzip_file_is_refused(tiny) -> None:
    path = _path(tiny, compress=True)
    path.write_bytes(b"<html>Please log in</html>")
    with pytest.raises(ConfigError, match="found a broken gzip file after 0 bytes"):
        read_checked(path, tiny.data_set.train_images, "fetch it anew")


def test_a_missing_file_is_named(tiny, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*nothing: No such file"):
        read_checked(tmp_path / "nothing", tiny.data_set.train_images, "fetch it anew")
