"""Write the generated pages: protocols from docstrings, messages from types, figures from results.

    python docs/generate.py            write what has changed
    python docs/generate.py --check    report what would change; exit 1 if anything would

Text that is written twice gets out of step. So a docstring is the only place that describes a
protocol or a collective, a message's type the only place for its fields, and a page of results/ the
only place for what was measured. Each page has a file in generators/. tests/test_docs.py checks
that all are current.
"""

import sys

from generators import PAGES, ROOT


def main() -> int:
    is_stale = False
    for path, make_page in PAGES.items():
        text = make_page()
        if not path.exists() or path.read_text() != text:
            is_stale = True
            if "--check" in sys.argv:
                print(f"{path.relative_to(ROOT)} is not current: run python docs/generate.py")
            else:
                path.write_text(text)
                print(f"wrote {path.relative_to(ROOT)}")
    return int(is_stale and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
