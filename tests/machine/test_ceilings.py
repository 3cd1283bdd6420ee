"""The section of the ceilings file that the probe writes: typed, and ignored if invalid."""

from pathlib import Path

import pytest

from paceline.machine import ceilings
from paceline.machine.ceilings import read_machine, write_machine
from paceline.system.ceilings import write_ceilings


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_written_figures_are_read_and_others_stay() -> None:
    write_machine({"l1_latency_s": 1e-9, "l2_latency_s": 4e-9})
    write_machine({"l1_latency_s": 2e-9})
    known = read_machine()
    assert known.figures == {"l1_latency_s": 2e-9, "l2_latency_s": 4e-9}
    assert known.why_not == ""


def test_changed_number_of_cores_invalidates_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    write_machine({"l1_latency_s": 1e-9})
    monkeypatch.setattr(ceilings, "num_cores", lambda: 77)
    known = read_machine()
    assert known.get("l1_latency_s") is None
    assert "there are now 77: run paceline probe" in known.why_not


@pytest.mark.parametrize("section", [7, [], {"figures": 3}, {"cores": 2}])
def test_damaged_section_is_ignored(section: object) -> None:
    write_ceilings("machine", section)
    assert "holds no figures that can be read" in read_machine().why_not


def test_invalid_figures_are_ignored() -> None:
    write_machine({"l1_latency_s": 1e-9})
    bad = {"a_s": float("nan"), "b_s": -1, "c_s": "fast", "d_s": True, "e_s": 0}
    write_ceilings("machine", {"cores": ceilings.num_cores(), "figures": bad})
    assert read_machine().figures == {}
