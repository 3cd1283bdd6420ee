"""``paceline launch --check``: a diff on standard output, notes on standard error, exit codes."""

import json
from pathlib import Path

import pytest

from paceline.cli import app as command

SCRIPTS = Path(__file__).parents[1] / "porting" / "plain"
REFUSED = "import torch\nbest = torch.optim.SparseAdam([])\nfor x in data:\n    best.step()\n"


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_bytes((SCRIPTS / "module_level.py").read_bytes())
    (tmp_path / "sparse.py").write_text(REFUSED)
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *tokens: str) -> tuple[int, str, str]:
    code = command.run(["launch", *tokens])
    out, err = capsys.readouterr()
    return code, out, err


def test_stdout_has_only_the_diff(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    code, out, err = run(capsys, "--check", "train.py", "--its-own", "3")
    assert (code, err) == (0, "")
    assert out.startswith("--- train.py\n+++ train.py\n@@ ")
    assert out.endswith('+if pace.is_main:\n+    torch.save(model.state_dict(), "end.pt")\n')
    assert sorted(path.name for path in here.iterdir()) == ["sparse.py", "train.py"]


def test_unsupported_script_gives_its_reason_and_exit_code_1(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, err = run(capsys, "--check", "sparse.py")
    assert (code, out) == (1, "")
    assert err.startswith("sparse.py: line 2: sparse gradients cannot be averaged")


def test_ported_script_needs_no_change(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    (here / "own.py").write_text("import paceline\npace = paceline.connect()\n")
    assert run(capsys, "--check", "own.py") == (0, "own.py: nothing to add\n", "")


@pytest.mark.parametrize(("name", "verdict"), [("train.py", "change"), ("sparse.py", "refused")])
def test_json_is_one_object(capsys: pytest.CaptureFixture[str], name: str, verdict: str) -> None:
    code, out, _ = run(capsys, "--json", "--check", name)
    report = json.loads(out)
    assert report.keys() == {"script", "verdict", "diff", "added_lines", "reason", "notes"}
    assert (report["script"], report["verdict"]) == (name, verdict)
    assert (code == 1) == (report["reason"] is not None) == (report["diff"] == "")


def test_usage_error_has_exit_code_2(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    (here / "broken.py").write_text("def (:\n")
    (here / "latin.py").write_bytes("x = 'ü'".encode("latin-1"))
    for tokens, words in {
        ("--check", "nowhere.py"): "there is no script nowhere.py",
        ("--check", "broken.py"): "broken.py:1 is not valid Python",
        ("--check", "latin.py"): "latin.py cannot be read as Python in UTF-8",
        (
            "--check",
            "--workers",
            "2",
            "train.py",
        ): "--check only reads the script, so --workers has no effect",
    }.items():
        code, out, err = run(capsys, *tokens)
        assert (code, out) == (2, "")
        assert words in err


def test_module_is_checked_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--check", "-m", "train")
    assert code == 0
    assert out.startswith("--- train.py\n")


def test_launch_of_an_unported_script_points_to_check(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "--workers", "2", "--device", "cpu", "train.py")
    assert code == 2
    assert "paceline launch --check SCRIPT says where they go" in err
