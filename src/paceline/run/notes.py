"""What a run says: to its user, into its trace, into its log of metrics.

    say -> observer (at once) + trace (as soon as it has begun)        record -> log of metrics

Nothing of this decides how a run goes: what cannot be written is said once, and the run goes on.
This module must not know members, epochs or checkpoints.
"""

from collections.abc import Callable

from ..report.files import MetricsLog
from ..report.live import Observer
from ..trace import Trace

_GOES_ON = "the run goes on"


class Notes:
    """The notes of one run.

    Args:
        log: of metrics, where one was asked for.
        now_s: seconds that the run has gone.
    """

    def __init__(
        self, observer: Observer, trace: Trace, log: MetricsLog | None, now_s: Callable[[], float]
    ) -> None:
        self._observer, self._trace, self._log = observer, trace, log
        self._now_s = now_s
        self._said: set[str] = set()
        self._unwritten: list[tuple[float, str]] | None = []
        """What was said before the trace has begun; None: it has."""

    def begin(self) -> None:
        """The trace has begun."""
        unwritten, self._unwritten = self._unwritten or [], None
        for at_s, text in unwritten:
            self._trace.note(at_s, text)

    def say(self, text: str) -> None:
        """To the user, and into the trace as soon as there is one."""
        self._observer.note(text)
        if self._unwritten is None:
            self._trace.note(self._now_s(), text)
        else:
            self._unwritten.append((self._now_s(), text))

    def say_once(self, text: str) -> None:
        """Say it, unless it was said."""
        if text not in self._said:
            self._said.add(text)
            self.say(text)

    def record(self, version: int, values: dict[str, float]) -> None:
        """Into the run's own log of metrics, where one was asked for."""
        if self._log is None:
            return
        try:
            self._log.write(version, self._now_s(), values)
        except OSError as error:
            self.say_once(f"the log of metrics cannot be written ({error.strerror}): {_GOES_ON}")

    def look_at_output(self) -> None:
        """Say what of it cannot be written."""
        trace, observer = self._trace, self._observer
        if trace.trouble:
            waits = "nothing is added to it any more" if trace.is_cut else "what is new waits"
            self.say_once(f"{trace.path} cannot be written ({trace.trouble}): {_GOES_ON}; {waits}")
        if observer.trouble:
            self.say_once(f"what the run says cannot be printed ({observer.trouble}): {_GOES_ON}")
