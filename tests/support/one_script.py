"""One worker's part of a script of the corpus: ``python one_script.py NAME FOLDER``.

Its notes go to FOLDER/worker-N.pt, even if it was refused.
"""

import sys
from pathlib import Path

import torch

import paceline
from scripts import find
from scripts.base import Record


def main() -> None:
    name, folder = sys.argv[1:]
    record = Record(Path(folder))
    find(name).text(record)
    torch.save(record.noted, Path(folder) / f"worker-{paceline.connect().worker}.pt")


if __name__ == "__main__":
    main()
