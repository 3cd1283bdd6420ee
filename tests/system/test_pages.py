"""Memory that is given back to the machine."""

import sys
from pathlib import Path

import pytest
import torch

from paceline.system.pages import give_back_freed

MIB = 1 << 20


def resident_bytes() -> int:
    rows = Path("/proc/self/status").read_text().splitlines()
    return next(int(one.split()[1]) << 10 for one in rows if one.startswith("VmRSS"))


@pytest.mark.skipif(sys.platform != "linux", reason="proc(5) and malloc_trim(3)")
def test_what_was_freed_goes_back() -> None:
    held = [torch.ones(MIB // 64) for _ in range(1024)]  # too small to be mapped by themselves
    kept = held[-1]
    del held
    before = resident_bytes()
    give_back_freed()
    assert resident_bytes() <= before
    assert float(kept.sum()) == MIB // 64
