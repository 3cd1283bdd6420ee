"""One module for each page that is made from the code or from results/, and the table of them."""

from collections.abc import Callable
from pathlib import Path

from . import claims, collectives, compression, messages, protocols, readme, rules
from .parts import DOCS, ROOT

PAGES: dict[Path, Callable[[], str]] = {
    DOCS / "claims.md": claims.page,
    DOCS / "protocols.md": protocols.page,
    DOCS / "collectives.md": collectives.page,
    DOCS / "pictures" / "collectives.svg": collectives.picture,
    DOCS / "compression.md": compression.page,
    DOCS / "messages.md": messages.page,
    DOCS / "rules.md": rules.page,
    ROOT / "README.md": readme.page,
}
"""Path of a page -> the function that makes its text; of README.md what is between its marks."""
