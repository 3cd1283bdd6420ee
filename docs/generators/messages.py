"""docs/messages.md: every message of the wire, from its type."""

import inspect
import re
from typing import Any, get_args, get_type_hints

from paceline.wire.messages import FromMember, ToMember

HEAD = """\
# The messages

Everything that members and the coordinator say to each other, made from the types in
`src/paceline/wire/messages.py` by `docs/generate.py`; edit those. How they become bytes stands in
`src/paceline/wire/codec.py`. Who does not speak the same table is refused by name.
"""


def page() -> str:
    """docs/messages.md."""
    directions = {
        "From a member to the coordinator": get_args(FromMember),
        "From the coordinator to a member": get_args(ToMember),
    }
    said = {kind for kinds in directions.values() for kind in kinds}
    parts = {one for kind in said for one in records_in(kind)} - said
    ordered = sorted(parts, key=lambda one: one.__name__)
    tables = {**directions, "What they are made of": ordered}
    pages = [f"\n\n## {title}\n\n{table(kinds)}" for title, kinds in tables.items()]
    return HEAD + "".join(pages)


def table(kinds: Any) -> str:
    rows = ["| message | fields | what it says |", "|---|---|---|"]
    for kind in kinds:
        fields = [f"`{name}`: {type_name(hint)}" for name, hint in get_type_hints(kind).items()]
        says = (inspect.getdoc(kind) or "").partition("\n\n")[0].replace("\n", " ")
        rows.append(f"| `{kind.__name__}` | {', '.join(fields)} | {says.replace('``', '`')} |")
    return "\n".join(rows) + "\n"


def records_in(kind: Any) -> set[Any]:
    """The NamedTuples among the types of its fields, however deep."""
    found = set()
    for hint in get_type_hints(kind).values() if hasattr(kind, "_fields") else get_args(kind):
        own = {hint} if hasattr(hint, "_fields") else set()
        found |= own | records_in(hint)
    return found


def type_name(hint: Any) -> str:
    """As it stands in the code, without where it comes from."""
    text = hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint)
    return re.sub(r"[a-z_.]+\.(?=[A-Z])", "", text).replace("|", "or")
