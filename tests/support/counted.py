"""A script whose weights count: one weight per sample; the loss is the mean of those drawn.

A gradient is 1 / (samples of the mini-batch) for each sample that was drawn and 0 for all others,
whatever the weights are. So plain SGD leaves in a weight the sum of what its sample weighed in
updates, and who knows which pushes an update was made of (the trace) knows every weight, under any
protocol and however stale a push was: one that was lost, or used twice, is seen.

    python counted.py PLAN FOLDER      PLAN: JSON of havoc_plan.Plan
                                       FOLDER: pid-S, cue-S-PLACE, struck-N, final-S-PID.pt

A worker signals itself at the lines of the plan; this module must not know what is judged.
"""

import faulthandler
import os
import random
import signal
import sys
import time
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from havoc_plan import Plan, Strike
from havoc_run import CALM

HOME = Path(paceline.__file__).parent
PLACES = tuple(
    str(HOME / name)
    for name in (
        "exchange/", "engines/local/process.", "script/evaluation.", "script/loader.",
        "script/prepared.", "script/worker.", "store/versions.", "store/control.",
        "store/parameter_store.", "store/sums.", "store/optimizer.",
    )
)  # fmt: skip
"""Code in which a worker meets others: no local work, no iterations of a waiting loop."""
AWHILE_S = 0.03
"""Actions of a script before ``prepare`` and between epochs."""


class Weights(nn.Module):
    """One weight per sample, and a buffer that every training pass changes."""

    passes: Tensor

    def __init__(self, num_samples: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_samples, dtype=torch.float64))
        self.register_buffer("passes", torch.zeros((), dtype=torch.float64))

    def forward(self, indices: Tensor) -> Tensor:
        if self.training:
            self.passes += 1
        return self.weight[indices]


class Lines:
    """Counts lines this process executes in `PLACES`; strikes at some, delays at others.

    Args:
        strikes: with the place of each, where it is noted that it has happened: it happens once,
            however many lives its worker has.
    """

    def __init__(self, plan: Plan, strikes: list[tuple[Strike, Path]], seat: int) -> None:
        self._left = sorted(strikes, key=lambda one: one[0].line)
        self._pause = plan.dawdle
        self._rng = random.Random(f"{plan.seed}/{seat}/{os.getpid()}")
        self._is_ours: dict[CodeType, bool] = {}
        self._count = 0

    def start(self) -> None:
        """From here on, also in the functions that this one was called from."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            frame.f_trace = self._enter(frame, "call", None)
            frame = frame.f_back
        sys.settrace(self._enter)

    def _enter(self, frame: FrameType, event: str, argument: object) -> Any:
        code = frame.f_code
        is_ours = self._is_ours.get(code)
        if is_ours is None:
            is_ours = code.co_filename.startswith(PLACES) and code.co_name[0] != "<"
            self._is_ours[code] = is_ours
        return self._line if is_ours else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        self._count += 1
        while self._left and self._left[0][0].line <= self._count:
            strike, mark = self._left.pop(0)
            try:
                mark.touch(exist_ok=False)
            except FileExistsError:
                continue
            code = frame.f_code
            mark.write_text(f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_name}")
            os.kill(os.getpid(), signal.Signals[f"SIG{strike.signal}"])
        if self._pause and self._rng.random() < self._pause:
            time.sleep(self._rng.uniform(0.0, 0.004))
        return self._line


def main(plan: Plan, folder: Path) -> None:
    """The script: an ordinary loop, with the plan's actions between its epochs."""
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    pace = paceline.connect()
    (folder / f"pid-{pace.worker}").write_text(str(os.getpid()))

    def cue(place: str) -> None:
        (folder / f"cue-{pace.worker}-{place}").touch()

    cue("early")
    time.sleep(AWHILE_S)
    marks = [(one, folder / f"struck-{i}") for i, one in enumerate(plan.strikes)]
    own = [one for one in marks if one[0].line and one[0].target == f"worker {pace.worker}"]
    own = [] if CALM in os.environ else own
    if own or plan.dawdle:
        Lines(plan, own, pace.worker).start()
    indices = torch.arange(plan.samples)
    model = Weights(plan.samples)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    data = TensorDataset(indices)
    loader = DataLoader(data, batch_size=plan.batch, num_workers=plan.loaders)
    model, optimizer, loader = pace.prepare(model, optimizer, loader)
    tests = DataLoader(TensorDataset(indices), batch_size=7)
    if "once" in plan.between:
        with pace.once():
            pass
    for epoch in pace.epochs(plan.epochs):
        cue(f"step-{epoch}")
        for (drawn,) in loader:
            with pace.step():
                time.sleep(plan.pause_s)
                optimizer.zero_grad()
                model(drawn).mean().backward()
                optimizer.step()
        if "evaluate" in plan.between:
            cue(f"evaluate-{epoch}")
            found = pace.evaluate(lambda batch: {"n": (len(batch[0]), len(batch[0]))}, tests)
            assert found["n"][1] == plan.samples, f"{found} of {plan.samples} were evaluated"
        cue(f"between-{epoch}")
        time.sleep(AWHILE_S)
        if "once" in plan.between:
            with pace.once():
                pass
        if "sum" in plan.between:
            assert pace.sum(1) >= 1
    cue("end")
    state = {name: value.clone() for name, value in model.state_dict().items()}
    torch.save(state, folder / f"new-{pace.worker}")
    (folder / f"new-{pace.worker}").rename(folder / f"final-{pace.worker}-{os.getpid()}.pt")


if __name__ == "__main__":
    main(Plan.read(sys.argv[1]), Path(sys.argv[2]))
