"""The doctor's prediction of the gain from loader workers, against the real gain.

    python bench/doctor_prices.py [--write]

A data set whose samples take a known time to decode (time.sleep), without workers: the predicted
share of a step that workers save, against that of the changed script, run on its own; and how much
slower an observed step is. Writes results/doctor-prices.md.
"""

import argparse
import tempfile
from pathlib import Path

from paceline.doctor.observed.launching import ScriptRun, observe
from table import machine, write_table

SCRIPT = (Path(__file__).parent.parent / "tests" / "doctor" / "slept.txt").read_text()
"""The script that the doctor's tests observe: samples sleep {decode_s}, by {workers} workers."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    machine_note = machine()
    rows = [measure(decode_s) for decode_s in (0.001, 0.004, 0.016)]
    print(*map(" | ".join, rows), sep="\n")
    if options.write:
        header = ("decode, a sample", "fix", "predicted", "95 %", "real", "slower while observed")
        write_table("doctor-prices", "Predicted and real gains of loader workers", header, rows,
                    machine_note)  # fmt: skip


def measure(decode_s: float) -> tuple[str, ...]:
    """Return one row: the prediction, and the time of the changed script."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.py"
        path.write_text(SCRIPT.format(decode_s=decode_s, workers=0))
        observed = observe(ScriptRun(script=path, price_s=60.0, only="num_workers"))
        (price,) = observed.prices
        path.write_text(SCRIPT.format(decode_s=decode_s, workers=dict(price.words)["num_workers"]))
        real = observe(ScriptRun(script=path, price_s=0.0))
    return (
        f"{decode_s * 1e3:g} ms", price.name, f"{price.saved:.1%}",
        f"{price.low:.1%} to {price.high:.1%}", f"{1 - real.observed_s / observed.step_s:.1%}",
        f"{observed.slow_down:.2f}x",
    )  # fmt: skip


if __name__ == "__main__":
    main()
