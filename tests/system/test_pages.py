"""Memory that is returned to the system."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paceline.system.pages import give_back_freed, lean_heap

MIB = 1 << 20


def resident_bytes() -> int:
    rows = Path("/proc/self/status").read_text().splitlines()
    return next(int(row.split()[1]) << 10 for row in rows if row.startswith("VmRSS"))


@pytest.mark.skipif(sys.platform != "linux", reason="proc(5) and malloc_trim(3)")
def test_freed_memory_is_returned_to_the_system() -> None:
    held = [torch.ones(MIB // 64) for _ in range(1024)]  # too small for mappings of their own
    kept = held[-1]
    del held
    before = resident_bytes()
    give_back_freed()
    assert resident_bytes() <= before
    assert float(kept.sum()) == MIB // 64


FREES = """
import torch
from pathlib import Path

def resident():
    rows = Path("/proc/self/status").read_text().splitlines()
    return next(int(one.split()[1]) for one in rows if one.startswith("VmRSS"))

held = [torch.ones(5 << 18) for _ in range(8)]  # 5 MiB each
last = torch.ones(64)
before = resident()
del held[:7]
print(before - resident())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="proc(5) and glibc")
def test_lean_heap_returns_blocks_at_once() -> None:
    added = lean_heap({})
    code = [sys.executable, "-c", FREES]
    output = subprocess.run(code, env=os.environ | added, stdout=subprocess.PIPE, check=True).stdout
    assert int(output) > 30_000  # KiB


def test_allocator_settings_of_the_user_are_kept() -> None:
    assert lean_heap({"MALLOC_ARENA_MAX": "1"}) == {}
    assert lean_heap({"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}) == {}
    other = lean_heap({"GLIBC_TUNABLES": "glibc.cpu.x86_ibt=on"})["GLIBC_TUNABLES"]
    assert other.startswith("glibc.cpu.x86_ibt=on:glibc.malloc.")
