"""What a member is asked to copy while its script is in its own code."""

from collections import deque
from types import SimpleNamespace
from typing import Any, cast

import pytest

from paceline.exchange.inbox import Inbox
from paceline.wire.messages import Snap, Stop

OF_MAIN = Snap(3, 9, is_first=True, behind=1, is_main=True)


@pytest.mark.parametrize(
    ("is_inside", "is_held", "written", "left"),
    [
        (False, False, [OF_MAIN], []),
        (True, True, [OF_MAIN], []),
        (
            True, False, [OF_MAIN._replace(is_main=False)],
            [OF_MAIN._replace(is_first=False, has_own=False)],
        ),
    ],
)  # fmt: skip
def test_what_is_half_changed_is_written_later(
    is_inside: bool, is_held: bool, written: list[Snap], left: list[Snap]
) -> None:
    """All else is written at once, and what is left keeps its place."""
    inbox, copied = Inbox.__new__(Inbox), list[Any]()
    inbox._queue = deque([OF_MAIN, Stop(9)])
    inbox._hooks = cast(Any, SimpleNamespace(is_held=lambda behind: is_held and behind == 1))
    inbox._copy_out = copied.append
    inbox.do_snaps(is_inside=is_inside)
    inbox.do_snaps(is_inside=is_inside)
    assert copied == written
    assert list(inbox._queue) == [*left, Stop(9)]
