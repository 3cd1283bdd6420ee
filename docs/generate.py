"""Writes what pages repeat: protocols from docstrings, messages from types, figures from results.

    python docs/generate.py            write what has changed
    python docs/generate.py --check    say whether anything would change; exit 1 if so

A page that is written twice is wrong once, so the docstring is the only place where a protocol or a
collective is described, a message's type the only place for its fields, and a page of results/ the
only one for what was measured. Each page has a file in generators/. tests/test_docs.py holds that
all are current.
"""

import sys

from generators import PAGES, ROOT


def main() -> int:
    stale = False
    for path, made in PAGES.items():
        wanted = made()
        if not path.exists() or path.read_text() != wanted:
            stale = True
            if "--check" in sys.argv:
                print(f"{path.relative_to(ROOT)} is not current: run python docs/generate.py")
            else:
                path.write_text(wanted)
                print(f"wrote {path.relative_to(ROOT)}")
    return int(stale and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
