"""Runs a page's commands as written, on two machines: python machines_page.py PAGE FOLDER

    first$ hostname        a block of such lines: those of a machine one after the other, in one
    first                  shell, both machines at the same time
    second$ hostname

Lines below a command are what its machine prints, in this order; ``...`` stands for anything, and
so do lines between. A block whose last such line begins with "error:" is to fail. ``export`` and
``unset`` last for the blocks that follow. Each machine has a folder of its own, where the page's
Python block lies as train.py, and /mnt, which is the same on both. `first` and `second` are
commands that bench/netns.sh has put on the path. It must not know what the page is about.
"""

import fnmatch
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

MACHINES = ("first", "second")
_WITHIN_S = 300.0
_PROMPT = re.compile(r"(first|second)\$ (.*)")
_PYTHON = re.compile(r"```python\n(.*?)```", re.DOTALL)


@dataclass(slots=True)
class Part:
    """Of one machine in a block."""

    commands: list[str] = field(default_factory=list)
    expected: list[str] = field(default_factory=list)


def blocks(page: str) -> list[dict[str, Part]]:
    """Those that have a prompt, in their order."""
    results = []
    for text in re.split(r"\n(?! {4})", page):
        lines = [line[4:] for line in text.splitlines() if line.startswith("    ")]
        if not any(_PROMPT.match(line) for line in lines):
            continue
        parts = {name: Part() for name in MACHINES}
        for line in lines:
            if (prompt := _PROMPT.match(line)) is not None:
                last = parts[prompt[1]]
                last.commands.append(prompt[2])
            elif line.strip():
                last.expected.append(line.strip())
        results.append(parts)
    return results


def begin(
    name: str, part: Part, exports: list[str], folder: Path
) -> "subprocess.Popen[str] | None":
    """The commands of one machine; what it exports is kept."""
    if not part.commands:
        return None
    script = "\n".join([f"mount --bind {folder / 'mnt'} /mnt", *exports, *part.commands])
    exports += [command for command in part.commands if command.startswith(("export ", "unset "))]
    return subprocess.Popen(
        [name, "bash", "-c", script], cwd=folder / name, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**os.environ, "PATH": f"{os.environ['PATH']}:{Path(sys.executable).parent}"},
    )  # fmt: skip


def missing(expected: list[str], said: list[str]) -> str | None:
    """The first line that was not said, in this order; None: all were."""
    left = iter(said)
    for line in expected:
        pattern = re.sub(r"([\[\]?*])", r"[\1]", line).replace("...", "*")
        if not any(fnmatch.fnmatchcase(" ".join(one.split()), pattern) for one in left):
            return line
    return None


def main() -> None:
    page, folder = Path(sys.argv[1]).read_text(), Path(sys.argv[2])
    script = _PYTHON.search(page)
    assert script is not None, "the page shows no script"
    (folder / "mnt").mkdir()
    for name in MACHINES:
        (folder / name).mkdir()
        (folder / name / "train.py").write_text(script[1])
    exports: dict[str, list[str]] = {name: [] for name in MACHINES}
    for block in blocks(page):
        begun = {name: begin(name, block[name], exports[name], folder) for name in MACHINES}
        for name, process in begun.items():
            if process is None:
                continue
            output, _ = process.communicate(timeout=_WITHIN_S)
            part = block[name]
            print(f"{name}$ {'; '.join(part.commands)}\n{output}", flush=True)
            lost = missing(part.expected, output.splitlines())
            if lost is not None:
                sys.exit(f"{name} did not say: {lost}")
            fails = any(value.expected and value.expected[-1].startswith("error:")
                        for value in block.values())  # fmt: skip
            if (process.returncode != 0) != fails:
                sys.exit(f"{name} ended with {process.returncode}")


if __name__ == "__main__":
    main()
