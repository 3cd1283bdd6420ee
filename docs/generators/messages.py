"""docs/messages.md: every message of the wire, from its type."""

import inspect
import re
from typing import Any, get_args, get_type_hints

from paceline.wire.messages import FromMember, ToMember

HEAD = """\
# The messages

Everything that members and the coordinator send each other, made from the types in
`src/paceline/wire/messages.py` by `docs/generate.py`; edit those. `src/paceline/wire/codec.py`
turns them into bytes. A peer with a different table is refused by name.
"""


def page() -> str:
    """Return docs/messages.md."""
    directions = {
        "From a member to the coordinator": get_args(FromMember),
        "From the coordinator to a member": get_args(ToMember),
    }
    messages = {kind for kinds in directions.values() for kind in kinds}
    records = {record for kind in messages for record in records_in(kind)} - messages
    ordered = sorted(records, key=lambda record: record.__name__)
    tables = {**directions, "What they are made of": ordered}
    pages = [f"\n\n## {title}\n\n{table(kinds)}" for title, kinds in tables.items()]
    return HEAD + "".join(pages)


def table(kinds: Any) -> str:
    rows = ["| message | fields | meaning |", "|---|---|---|"]
    for kind in kinds:
        fields = [f"`{name}`: {type_name(hint)}" for name, hint in get_type_hints(kind).items()]
        summary = (inspect.getdoc(kind) or "").partition("\n\n")[0].replace("\n", " ")
        rows.append(f"| `{kind.__name__}` | {', '.join(fields)} | {summary.replace('``', '`')} |")
    return "\n".join(rows) + "\n"


def records_in(kind: Any) -> set[Any]:
    """Return the NamedTuples among the types of its fields, at any depth."""
    records = set()
    for hint in get_type_hints(kind).values() if hasattr(kind, "_fields") else get_args(kind):
        own = {hint} if hasattr(hint, "_fields") else set()
        records |= own | records_in(hint)
    return records


def type_name(hint: Any) -> str:
    """Return the type as written in the code, without module names."""
    text = hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint)
    return re.sub(r"[a-z_.]+\.(?=[A-Z])", "", text).replace("|", "or")
