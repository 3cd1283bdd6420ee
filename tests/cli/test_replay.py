"""``paceline replay``: after a run, up to a version, with JSON, and with errors."""

import json
from collections.abc import Callable
from pathlib import Path

from resealing import reseal

Say = Callable[[str], tuple[int, str, str]]


def test_run_from_the_command_line_is_replayed(say: Say) -> None:
    assert say("train quadratic --workers 2 --protocol async --updates 30")[0] == 0
    code, out, _ = say("replay")
    assert code == 0
    assert "30 updates repeated" in out
    assert "equal: every decision, every loss, and every bit of the final model" in out
    code, out, _ = say("replay runs/latest --until 12 --json")
    assert code == 0
    report = json.loads(out)
    assert (report["version"], report["is_equal"], report["is_model_equal"]) == (12, True, None)


def test_unwritable_save_path_is_refused_before_the_replay(say: Say) -> None:
    code, _, err = say("replay nowhere --save .")
    assert code == 2
    assert ". is a folder; name a file in an existing folder" in err


def test_nan_metric_is_null(say: Say) -> None:
    line = "simulate quadratic --workers 2 --delay exp:5ms --updates 20 --lr 100 --nonfinite skip"
    assert say(f"{line} --run-dir here")[0] == 0
    code, out, err = say("replay here --json")
    assert (code, err) == (0, "")
    assert json.loads(out)["metrics"] == {"loss": None}


def test_difference_is_named_and_has_exit_code_1(say: Say) -> None:
    say("train quadratic --updates 5")
    trace = Path("runs/latest/trace.jsonl")
    text = trace.read_text()
    first = text.index('"loss":') + len('"loss":')
    trace.write_text(reseal(text[:first] + "1" + text[first:]))
    code, out, _ = say("replay")
    assert code == 1
    assert "different: push 1 (member 0, of version 0" in out
    code, _, err = say("replay nowhere")
    assert code == 2
    assert "cannot be read" in err
