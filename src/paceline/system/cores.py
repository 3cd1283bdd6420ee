"""How many cores this process may use: the machine's, its affinity and the container's quota.

Torch looks at the affinity only, so in a container with a quota it starts more threads than it
has cores. This module must not import torch.
"""

import os
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


def num_cores(root: Path = _ROOT) -> int:
    """Whole cores, at least 1; ``root`` is where the control groups are mounted."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota = _quota_cores(root)
    return max(1, min(cores or 1, int(quota))) if quota else cores or 1


def _quota_cores(root: Path) -> float | None:
    """Cores that the control group allows (version 2, then 1); None without a limit."""
    try:
        quota, period = (root / "cpu.max").read_text().split()
        return None if quota == "max" else float(quota) / float(period)
    except (OSError, ValueError):
        pass
    try:
        quota_us = float((root / "cpu" / "cpu.cfs_quota_us").read_text())
        period_us = float((root / "cpu" / "cpu.cfs_period_us").read_text())
        return quota_us / period_us if quota_us > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None
