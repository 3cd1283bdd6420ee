"""The pages are true: generated parts are current, links resolve, names exist, code runs."""

import ast
import inspect
import re
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from generators import PAGES as GENERATED
from generators import claims

from paceline.cli.app import VERBS
from runs import train
from tiny import TASK

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
PACKAGE = ROOT / "src" / "paceline"

LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")
NAME = re.compile(r"`([a-z0-9_/]+\.py):([A-Za-z_][A-Za-z0-9_.]*)`")
RUNNABLE = re.compile(r"^```python run\n(.*?)^```", re.MULTILINE | re.DOTALL)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", GENERATED, ids=name_of)
def test_generated_pages_are_current(path: Path) -> None:
    assert path.read_text() == GENERATED[path](), "run python docs/generate.py"


def test_verdicts_on_claims_follow_their_figures() -> None:
    assert claims.near(140e-9, 46e-9, 120e-9) == claims.holds(True) == "holds"
    assert "worse" in claims.near(250e-9, 46e-9, 120e-9)
    assert "better" in claims.near(20e-9, 46e-9, 120e-9)
    assert "better" in claims.near(250e9, 40e9, 100e9, is_rate=True)
    assert "does not hold" in claims.about(137.0, 500.0)
    assert claims.first_number("-0.031 (-0.051 to -0.001)") == -0.031
    assert claims.first_number("one push, 1,170 us") == 1170
    assert claims.seconds("844 ms") == pytest.approx(0.844)
    assert claims.mebibytes("2.0 GiB") == 2048


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_point_to_existing_files(page: Path) -> None:
    targets = [match[1] for match in LINK.finditer(page.read_text())]
    missing = [
        target
        for target in targets
        if not target.startswith(("http://", "https://")) and not (page.parent / target).exists()
    ]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_names_in_the_pages_exist_in_the_code(page: Path) -> None:
    for match in NAME.finditer(page.read_text()):
        path, dotted = PACKAGE / match[1], match[2]
        assert path.is_file(), match[0]
        assert dotted in defined_in(path), match[0]


def defined_in(path: Path) -> set[str]:
    """``name`` and ``Class.name`` of the definitions of a file and its classes."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {
                f"{node.name}.{one.name}" for one in node.body if isinstance(one, ast.FunctionDef)
            }
    return names


JOURNEYS: dict[str, dict[str, Any]] = {
    "gradient": {},
    "mini-batch": {},
    "death": {"fault": ("kill worker 1 at step 3",)},
}
ELSEWHERE = (
    "events",
    "engines/",
    "launch/",
    "wire/",
    "system/",
    "exchange/peers",
    "exchange/share",
)
"""Modules for processes and peers, which a run in one process does not use."""
NOT_HERE = {
    "gradient": {
        "Peers._hear_round", "PeerLeases", "Superseded", "SoloExchange", "DistributedAveraging",
        "Schedule",
    },
    "mini-batch": {"PeerLeases", "Coordinator.give_back", "StreamedLoader", "StreamClient"},
    "death": {
        "Beginners.replace", "Newcomers.tick", "RunState.begins_with", "Jobs.needs", "Silence",
        "SyncProtocol.react", "GivenUp",
    },
}  # fmt: skip
"""Names of a page for cases other than the one followed here."""


@pytest.mark.parametrize("name", JOURNEYS)
def test_run_calls_the_functions_a_journey_names(name: str, tmp_path: Path) -> None:
    """Each function a page names is called by a run in one process."""
    page = (ROOT / "docs" / f"journey-of-a-{name}.md").read_text()
    named = {match[2] for match in NAME.finditer(page) if not match[1].startswith(ELSEWHERE)}
    called: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # not a class body
            called.add(frame.f_code.co_qualname)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        chosen = {"workers": 3, "protocol": "k-batch-sync:2", **JOURNEYS[name]}
        train(TASK, tmp_path, engine="inline", **chosen)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    classes = {one.split(".")[0] for one in called}
    assert {one for one in named if one not in called | classes} <= NOT_HERE[name]
    assert len(named) > 10


def test_readme_lists_the_existing_verbs() -> None:
    rows = re.findall(r"^\| `paceline (\w+)", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert rows == [verb.name for verb in VERBS]


BLOCKS = [
    pytest.param(block, id=f"{name_of(page)}:{number}")
    for page in PAGES
    for number, block in enumerate(RUNNABLE.findall(page.read_text()))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_python_blocks_marked_to_run_do_run(
    block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "<page>", "exec"), {"__name__": "__main__"})
