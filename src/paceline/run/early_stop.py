"""What the run is to do by its evaluations: stop at an accuracy, keep the best parameters.

    evaluation -> metrics -> the accuracy among them -> stop?    none among them -> said, once

This module must not know how metrics are measured, nor how a run is stopped.
"""

from collections.abc import Callable, Mapping

from ..config import RunSettings, flag_of
from ..metrics import accuracy_among
from ..report.live import Observer


class EarlyStop:
    """The settings of one run that depend on a metric."""

    def __init__(self, settings: RunSettings, observer: Observer) -> None:
        self._target = settings.target_accuracy
        self._keeps_best = settings.keep_best
        self._is_dry = settings.dry_run
        self._observer = observer
        self._has_evaluated = False

    def look(self, metrics: Mapping[str, float], stop: Callable[[str], None]) -> None:
        """An evaluation between epochs came to these means."""
        name = accuracy_among(metrics)
        if not self._has_evaluated:
            self._has_evaluated = True
            self._refuse_names(metrics, name)
        if self._target is not None and name is not None and metrics[name] >= self._target:
            stop(f"accuracy {metrics[name]:.4f} reached {self._target:g}")

    def close(self) -> None:
        """The run is over: what was asked for and could not be is said."""
        if not self._has_evaluated and not self._is_dry:
            for flag in self._flags(needs_accuracy=False):
                self._observer.note(
                    f"{flag} did nothing: pace.evaluate(fn, loader) was not called between epochs"
                )

    def _refuse_names(self, metrics: Mapping[str, float], name: str | None) -> None:
        if name is not None:
            return
        measured = ", ".join(map(repr, sorted(metrics))) or "nothing"
        for flag in self._flags(needs_accuracy="loss" in metrics):
            self._observer.note(
                f"{flag} does nothing: pace.evaluate measures {measured}, and none of it is called "
                "acc or accuracy, or alone ends so; let fn return {'acc': (right, count)}"
            )

    def _flags(self, *, needs_accuracy: bool) -> list[str]:
        """What was asked for; the best parameters are also told by a loss."""
        asked = [("target_accuracy", self._target is not None)]
        asked += [] if needs_accuracy else [("keep_best", self._keeps_best)]
        return [flag_of(name) for name, is_asked in asked if is_asked]
