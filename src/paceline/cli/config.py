"""``paceline config show``: the settings of a run, and where each came from."""

import json as json_format
from typing import Annotated

from cyclopts import App, Parameter

from ..config import NAMES, resolve
from ..fields import Value
from .flags import NO_FLAGS, ConfigFile, RunFlags, given


def register(app: App) -> None:
    """Put the verb into the application."""
    verb = App(name="config", help="Settings, and where each came from.")
    verb.command(show)
    app.command(verb)


def show(
    *,
    origin: Annotated[bool, Parameter(negative=(), help="Say where each came from.")] = False,
    flags: RunFlags = NO_FLAGS,
    config: ConfigFile = None,
) -> None:
    """Show the settings that a run given these flags would have."""
    explicit = given(flags)
    resolved = resolve(explicit, config)
    values: dict[str, Value] = {name: getattr(resolved.settings, name) for name in NAMES}
    if resolved.settings.json:
        rows = {
            name: {"value": value, "origin": resolved.origins[name]}
            for name, value in values.items()
            if name != "json"
        }
        print(json_format.dumps({"settings": rows}, allow_nan=False))
        return
    width = max(len(name) for name in NAMES)
    texts = {name: _text(value) for name, value in values.items()}
    column = max(len(text) for text in texts.values())
    for name in NAMES:
        if name != "json":
            where = f"  {resolved.origins[name]}" if origin else ""
            print(f"{name:<{width}}  {texts[name]:<{column}}{where}".rstrip())


def _text(value: Value) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return " ".join(value) or "-"
    return str(value)
