"""Changes to the interpreter by a script in this process are undone."""

import multiprocessing.process
import sys
from pathlib import Path

from paceline.system.interpreter import kept_interpreter
from runs import run_script


def interpreter_state() -> list[object]:
    start = multiprocessing.process.ORIGINAL_DIR  # type: ignore[attr-defined]  # the interpreter sets it
    return [list(sys.path), list(sys.argv), sys.modules["__main__"], start]


def test_interpreter_state_is_restored_after_an_error() -> None:
    before = interpreter_state()
    try:
        with kept_interpreter():
            sys.path.insert(0, "elsewhere")
            sys.argv = ["train.py"]
            sys.modules["__main__"] = sys
            raise ValueError
    except ValueError:
        assert interpreter_state() == before


def test_inline_run_restores_the_interpreter_state(tmp_path: Path) -> None:
    """Each worker has a ``__main__`` of its own, and the last to end is not the first to start."""
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, torch, paceline\n"
        "pace = paceline.connect()\n"
        "assert __name__ == '__main__' and sys.argv[1:] == ['5'], sys.argv\n"
        "model = torch.nn.Linear(1, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "data = torch.utils.data.TensorDataset(torch.ones(8, 1))\n"
        "loader = torch.utils.data.DataLoader(data, batch_size=4)\n"
        "model, optimizer, loader = pace.prepare(model, optimizer, loader)\n"
        "for epoch in pace.epochs(2):\n"
        "    for (x,) in loader:\n"
        "        optimizer.zero_grad()\n"
        "        model(x).sum().backward()\n"
        "        optimizer.step()\n"
    )
    before = interpreter_state()
    run = run_script(script, tmp_path, "5", workers=3, engine="inline", protocol="full-sync")
    assert run.summary.updates == 4
    assert interpreter_state() == before
