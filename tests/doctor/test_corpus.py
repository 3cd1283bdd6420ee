"""The rules on scripts that were labelled by hand, and on those that are known to be right."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from paceline.doctor.examine import examine
from paceline.doctor.findings import Severity

ROOT = Path(__file__).parent.parent.parent
CORPUS = Path(__file__).parent / "corpus"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("doctor_bench", ROOT / "bench" / "doctor.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "bench"))
        spec.loader.exec_module(module)
    return module


def test_what_is_found_is_labelled_and_what_is_labelled_is_found(bench: ModuleType) -> None:
    wanted, found = set(), set()
    for path in CORPUS.glob("*.py"):
        labelled, judged = bench.judge(path)
        wanted |= {(path.name, *one) for one in labelled}
        found |= {(path.name, *one) for one in judged}
    assert len(wanted) > 60
    assert len(wanted & found) >= 0.98 * len(found), found - wanted
    assert len(wanted & found) >= 0.95 * len(wanted), wanted - found


def test_no_bug_is_seen_in_the_examples() -> None:
    for path in (ROOT / "examples").glob("*.py"):
        assert examine(path).of(Severity.BUG) == [], path
