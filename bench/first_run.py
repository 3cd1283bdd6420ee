"""The exact output of a new user's first run: LeNet on Fashion-MNIST, two workers.

    python bench/first_run.py [--write]

The call of ``make train``, without a terminal. Writes results/first_run.md; README.md shows all of
it except the middle.
"""

import argparse
import subprocess
import sys
import tempfile

from table import RESULTS, machine

CALL = "train lenet --workers 2 --batch-size 256 --lr 0.2 --epochs 10"
PAGE = """\
# The first run

`python bench/first_run.py --write`

What `paceline {call}` prints where it has no terminal:

```text
{said}```

{machine}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    machine_note = machine()
    with tempfile.TemporaryDirectory() as folder:
        result = subprocess.run(
            [sys.executable, "-m", "paceline", *CALL.split()], cwd=folder, stdout=subprocess.PIPE,
            text=True, check=True,
        )  # fmt: skip
    print(result.stdout)
    if options.write:
        page = PAGE.format(call=CALL, said=result.stdout, machine=machine_note)
        (RESULTS / "first_run.md").write_text(page)


if __name__ == "__main__":
    main()
