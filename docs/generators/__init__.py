"""A file for each page that is made from the code or from results/, and the table of them all."""

from collections.abc import Callable
from pathlib import Path

from . import collectives, compression, messages, protocols, readme, rules
from .parts import DOCS, ROOT

PAGES: dict[Path, Callable[[], str]] = {
    DOCS / "protocols.md": protocols.page,
    DOCS / "collectives.md": collectives.page,
    DOCS / "pictures" / "collectives.svg": collectives.picture,
    DOCS / "compression.md": compression.page,
    DOCS / "messages.md": messages.page,
    DOCS / "rules.md": rules.page,
    ROOT / "README.md": readme.page,
}
"""Where a page lies -> what has to stand there; of README.md all between its marks."""
