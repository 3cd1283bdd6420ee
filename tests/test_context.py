"""The context of a member survives JSON."""

import json

from paceline.context import Context
from paceline.passes import ScriptPlace


def test_context_survives_json() -> None:
    context = Context(
        workers=3,
        delay=("exp:20ms",),
        slow=("1=5x",),
        notes=("a", "b"),
        run_identity=(4, 5),
        place=ScriptPlace(2, 5, 1, (0,)),
    )
    assert Context.read(json.loads(json.dumps(context.write()))) == context


def test_unknown_fields_are_ignored_and_missing_ones_default() -> None:
    assert Context.read({"workers": 2, "of_tomorrow": 1}) == Context(workers=2)
