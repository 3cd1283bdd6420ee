"""docs/two-machines.md: every command as written, in two network namespaces."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NETNS = ROOT / "bench" / "netns.sh"


def _why_not() -> str:
    """Why two machines cannot be simulated here; "" where they can."""
    if os.geteuid() != 0 or shutil.which("tc") is None:
        return "needs root, and tc of iproute2"
    tried = subprocess.run([NETNS, "with", "true"], capture_output=True, text=True, check=False)
    return tried.stderr.strip() if tried.returncode else ""


@pytest.mark.timeout(300)
def test_the_commands_of_the_page_work_as_written() -> None:
    if reason := _why_not():
        pytest.skip(reason)
    commands = str(Path(sys.executable).parent)  # python, torchrun and paceline, as it has them
    env = {**os.environ, "PATH": os.pathsep.join([commands, os.environ["PATH"]])}
    done = subprocess.run([NETNS, "page"], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_the_script_names_what_it_needs_in_one_sentence(
    tmp_path: Path,
) -> None:
    for name in ("bash", "dirname", "id", "uname", "ip"):
        path = shutil.which(name)
        if path is not None and name != "ip":
            (tmp_path / name).symlink_to(path)
    done = subprocess.run(
        ["/bin/bash", NETNS, "with", "true"], capture_output=True, text=True, check=False,
        env={"PATH": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("bench/netns.sh: needs ")
    assert done.stderr.count("\n") == 1
