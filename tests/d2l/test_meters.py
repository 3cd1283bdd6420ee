"""The stopwatch, the sums, and the curves."""

import math
import sys
import time
import types
from pathlib import Path
from xml.etree import ElementTree

import pytest

from paceline.d2l.meters import Accumulator, Animator, Timer
from paceline.errors import ConfigError


def test_timer_keeps_its_times() -> None:
    timer = Timer()
    time.sleep(0.02)  # what is timed
    first = timer.stop()
    timer.start()
    second = timer.stop()
    assert first >= 0.02 > second
    assert timer.times == [first, second]
    assert timer.sum() == pytest.approx(first + second)
    assert timer.avg() == pytest.approx((first + second) / 2)
    assert timer.cumsum() == pytest.approx([first, first + second])


def test_timer_that_was_never_stopped_has_no_mean() -> None:
    with pytest.raises(ConfigError, match=r"call stop\(\) first"):
        Timer().avg()


def test_sums_are_added_side_by_side() -> None:
    sums = Accumulator(3)
    sums.add(1, 2.5, True)
    sums.add(2, 0.5, True)
    assert [sums[0], sums[1], sums[2]] == [3.0, 3.0, 2.0]
    sums.reset()
    assert sums.data == [0.0, 0.0, 0.0]


def test_curves_grow_point_by_point(tmp_path: Path) -> None:
    animator = Animator("epoch", "share", legend=["train", "test"], xlim=[1, 4], ylim=[0, 1])
    animator.add(1, (0.5, None))
    animator.add(2, (0.7, 0.6))
    assert animator.X == [[1.0, 2.0], [2.0]]
    assert animator.Y == [[0.5, 0.7], [0.6]]
    animator.save(tmp_path / "picture.svg")
    texts = [node.text for node in ElementTree.parse(tmp_path / "picture.svg").iter() if node.text]
    assert {"train", "test", "epoch", "share", "4"} <= set(texts)


def test_single_curve_takes_numbers() -> None:
    animator = Animator("epoch", "test acc", xlim=[1, 10])
    animator.add(1, (0.25,))
    animator.add(2, 0.75)
    assert animator.Y[0][-1] == 0.75


def test_picture_without_points_is_one_too() -> None:
    ElementTree.fromstring(Animator()._repr_svg_())


def test_value_that_is_not_finite_leaves_a_gap() -> None:
    animator, drawn = Animator("epoch", "loss"), Animator("epoch", "loss")
    for x, y in enumerate((2.3, math.nan, 1.9, math.inf)):
        animator.add(x, y)
        if math.isfinite(y):
            drawn.add(x, y)
    assert animator._repr_svg_() == drawn._repr_svg_()
    assert len(animator.Y[0]) == 4


def test_unknown_look_is_refused() -> None:
    with pytest.raises(TypeError, match="'colour'"):
        Animator("epoch", colour="red")


def test_notebook_shows_one_picture_and_draws_it_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    handle = types.SimpleNamespace(update=lambda value: shown.append("again"))

    def display(value: Animator, *, display_id: bool) -> object:
        assert display_id
        assert value._repr_svg_().startswith("<svg")
        shown.append("first")
        return handle

    shell = types.SimpleNamespace(kernel=object())
    modules = {"IPython": types.ModuleType("IPython"), "IPython.display": types.ModuleType("d")}
    monkeypatch.setattr(modules["IPython"], "get_ipython", lambda: shell, raising=False)
    monkeypatch.setattr(modules["IPython.display"], "display", display, raising=False)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    animator = Animator("epoch")
    for epoch in range(3):
        animator.add(epoch, 1.0)
    assert shown == ["first", "again", "again"]
