"""Charts: what is drawn is what was given, and a page loads nothing from the network."""

from __future__ import annotations

import re
import sys
from xml.etree import ElementTree

import pytest

from benchmarks.scaling_drawn import build_table
from hvdkit.errors import MissingDependencyError
from hvdkit.tools.charts import build_page, draw_bars, draw_lines, embed, label_log_axis, new_figure


def test_lines_have_their_points_and_the_axis_only_the_ticks_asked_for() -> None:
    axis = new_figure("a test", 4, 3).subplots()
    draw_lines(axis, {"a": [(1, 10), (10, 100)], "b": [(1, 1)]}, dashed=["b"])
    label_log_axis(axis, [1, 10], "{:g} B".format)
    first, second = axis.get_lines()
    assert (list(first.get_xdata()), list(first.get_ydata())) == ([1, 10], [10, 100])
    assert (first.get_linestyle(), second.get_linestyle()) == ("-", "--")
    assert [text.get_text() for text in axis.get_xticklabels()] == ["1 B", "10 B"]
    assert axis.get_xscale() == "log"


def test_bars_are_stacked_with_their_sum_at_the_end() -> None:
    axis = new_figure("a test", 4, 3).subplots()
    draw_bars(axis, {"one": {"work": 1.0, "wait": 3.0}, "two": {"work": 2.0}}, title="t", show="{:g} s".format)
    work, wait = axis.containers
    assert [bar.get_width() for bar in work] == [1, 2]
    assert [(bar.get_x(), bar.get_width()) for bar in wait] == [(1, 3), (2, 0)]
    assert [text.get_text() for text in axis.texts] == ["4 s", "2 s"]
    assert axis.get_title() == "t"


def test_a_page_loads_nothing_and_escapes_text() -> None:
    figure = new_figure("a test", 4, 3)
    draw_bars(figure.subplots(), {"x": {"y": 1}})
    svg = embed(figure)
    ElementTree.fromstring(svg)
    page = build_page("A <page>", [svg, build_table(["a"], [["<b>"]])])
    assert not re.findall(r"""(?:src|href)="(?!#)|@import|url\((?!#)|<script""", page)
    assert "<td>&lt;b&gt;</td>" in page and "<title>A &lt;page&gt;</title>" in page


def test_without_matplotlib_the_error_names_what_asked_and_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingDependencyError, match=r"hvdkit profile --output draws .* pip install 'hvdkit\[plot\]'"):
        new_figure("hvdkit profile --output", 1, 1)
