"""Metrics are written for other tools, once a run."""

import sys
from pathlib import Path

import pytest

from paceline.errors import ConfigError
from paceline.report.files import open_log
from paceline.system.files import OpenFolder


def test_the_csv_has_one_value_a_line(tmp_path: Path) -> None:
    log = open_log("csv", OpenFolder.open(tmp_path))
    log.write(235, 7.4, {"acc": 0.1, "loss": 2.3})
    log.write(470, 14.8, {"acc": 0.5})
    log.close()
    log.close()
    assert (tmp_path / "metrics.csv").read_text() == (
        "version,t_s,name,value\n235,7.400,acc,0.1\n235,7.400,loss,2.3\n470,14.800,acc,0.5\n"
    )


def test_tensorboard_gets_an_event_file(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    log = open_log("tensorboard", OpenFolder.open(tmp_path))
    log.write(235, 7.4, {"acc": 0.1})
    log.close()
    assert list((tmp_path / "tensorboard").glob("events.out.tfevents.*"))


def test_tensorboard_without_its_package_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ConfigError, match=r"pip install 'paceline\[tensorboard\]'.*--log csv"):
        open_log("tensorboard", OpenFolder.open(tmp_path))
