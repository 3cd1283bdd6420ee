"""A stopwatch, sums, and curves that grow while a loop runs."""

import importlib
import itertools
import math
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..checkpoints.state import write_whole
from ..errors import ConfigError
from ..report.chart import Curve, Diagram, draw_chart
from ..report.text import Point

_IGNORED = ("ylim", "xscale", "yscale", "fmts", "nrows", "ncols", "figsize")
"""How the book's picture looks; this one is drawn in one way."""


class Timer:
    """A stopwatch that runs from the start and keeps its times, in seconds.

    It does not wait for queued work: call `synchronize` first, or use `Benchmark`, which does.
    """

    def __init__(self) -> None:
        self.times: list[float] = []
        self.start()

    def start(self) -> None:
        """Start, or start again."""
        self._start_s = time.perf_counter()

    def stop(self) -> float:
        """Return the seconds since the start, and keep them."""
        self.times.append(time.perf_counter() - self._start_s)
        return self.times[-1]

    def avg(self) -> float:
        """Return the mean of all times.

        Raises:
            ConfigError: it was never stopped.
        """
        if not self.times:
            raise ConfigError("the timer was never stopped, so it has no mean: call stop() first")
        return self.sum() / len(self.times)

    def sum(self) -> float:
        """Return the sum of all times."""
        return sum(self.times)

    def cumsum(self) -> list[float]:
        """Return the sums of the first time, the first two, ..., all."""
        return list(itertools.accumulate(self.times))


class Accumulator:
    """Sums of ``n`` numbers, added side by side.

    Example:
        >>> sums = Accumulator(2)
        >>> sums.add(3, 4)
        >>> sums.add(1, 4)
        >>> sums[0] / sums[1]
        0.5
    """

    def __init__(self, n: int) -> None:
        self.data = [0.0] * n

    def add(self, *values: float) -> None:
        """Add one number to each sum."""
        self.data = [total + float(value) for total, value in zip(self.data, values, strict=True)]

    def reset(self) -> None:
        """Set all sums to 0."""
        self.data = [0.0] * len(self.data)

    def __getitem__(self, index: int) -> float:
        return self.data[index]


class Animator:
    """Curves to which a loop adds points. A notebook shows them, and draws them anew at each point.

    In a terminal nothing is shown; ``save`` writes the picture.

    Args:
        xlabel: below the x axis.
        ylabel: above the y axis.
        legend: names of the curves.
        xlim: the ends of the x axis, of which only the second matters: it starts at 0.
        looks: ``ylim``, ``fmts``, ``figsize`` and other looks of the book's picture: ignored.

    Attributes:
        X: the x values of each curve.
        Y: the y values of each curve.
    """

    def __init__(
        self,
        xlabel: str | None = None,
        ylabel: str | None = None,
        legend: Sequence[str] | None = None,
        xlim: Sequence[float] | None = None,
        **looks: object,
    ) -> None:
        if unknown := [name for name in looks if name not in _IGNORED]:
            raise TypeError(f"Animator() got an unexpected keyword argument {unknown[0]!r}")
        self.X: list[list[float]] = []
        self.Y: list[list[float]] = []
        self._labels = xlabel or "x", ylabel or ""
        self._legend = list(legend or ())
        self._stop = float(xlim[1]) if xlim is not None else None
        self._shown: Any = None

    def add(self, x: float | Sequence[float], y: float | Sequence[float | None]) -> None:
        """Add a point to each curve.

        Args:
            x: one for all curves, or one for each.
            y: one for each curve, None where a curve gets no point; a number if there is one curve.
        """
        ys = list(y) if isinstance(y, Sequence) else [y]
        xs = list(x) if isinstance(x, Sequence) else [x] * len(ys)
        while len(self.Y) < len(ys):
            self.X.append([])
            self.Y.append([])
        for number, (at, value) in enumerate(zip(xs, ys, strict=True)):
            if value is not None:
                self.X[number].append(float(at))
                self.Y[number].append(float(value))
        self._show()

    def save(self, path: str | Path) -> None:
        """Write the picture as an SVG file.

        Raises:
            FileError: it cannot be written there.
        """
        write_whole(Path(path), self._repr_svg_().encode())

    def _repr_svg_(self) -> str:
        """Return the picture; a notebook calls this."""
        x_label, y_label = self._labels
        names = [*self._legend, *(f"curve {number + 1}" for number in range(len(self.Y)))]
        if not self._legend and len(self.Y) == 1:
            names = [y_label or "y"]
        curves = tuple(
            Curve(name=name, points=tuple(_finite(xs, ys)))
            for name, xs, ys in zip(names, self.X, self.Y, strict=False)
        )
        diagram = Diagram(label=y_label, curves=curves, x_label=x_label, stop=self._stop)
        return draw_chart(y_label or x_label, "", [diagram])

    def _show(self) -> None:
        """Show the picture if a notebook runs this, in the place where it was before."""
        ipython = sys.modules.get("IPython")
        shell = ipython.get_ipython() if ipython is not None else None
        if not hasattr(shell, "kernel"):  # a terminal shows no pictures
            return
        display = importlib.import_module("IPython.display").display

        if self._shown is None:
            self._shown = display(self, display_id=True)
        else:
            self._shown.update(self)


def _finite(xs: Iterable[float], ys: Iterable[float]) -> Iterator[Point]:
    """Return the points that can be drawn; one that is nan or inf has no place in a picture."""
    for x, y in zip(xs, ys, strict=True):
        if math.isfinite(x) and math.isfinite(y):
            yield Point(t=x, value=y)
