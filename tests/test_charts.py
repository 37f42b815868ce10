"""Charts as SVG: well-formed, with every point where it belongs."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from hvdkit.tools.charts import Axis, Line, build_page, build_table, draw_bars, draw_lines

SVG = "{http://www.w3.org/2000/svg}"


def circles(drawn: str, style: str) -> list[tuple[float, float]]:
    found = ElementTree.fromstring(drawn).iter(f"{SVG}circle")
    return [(float(one.attrib["cx"]), float(one.attrib["cy"])) for one in found if one.attrib["class"] == style]


def texts(drawn: str) -> list[str]:
    return [str(one.text) for one in ElementTree.fromstring(drawn).iter(f"{SVG}text")]


def test_points_of_equal_ratio_are_equally_far_apart_on_a_log_axis() -> None:
    lines = [Line("a", [(1, 10), (10, 100), (100, 1000)]), Line("b <&>", [(10, 10)])]
    drawn = draw_lines(lines, x=Axis("bytes", log=True), y=Axis("time", log=True), title="t & u")
    (x1, y1), (x2, y2), (x3, y3) = circles(drawn, "fill0")
    assert x2 - x1 == pytest.approx(x3 - x2, abs=0.2)
    assert y1 - y2 == pytest.approx(y2 - y3, abs=0.2)
    assert y1 > y3, "up is more"
    assert circles(drawn, "fill1") == [(x2, y1)]
    assert {"t & u", "a", "b <&>", "bytes", "time", "10", "100"} <= set(texts(drawn))
    tips = [str(tip.text) for tip in ElementTree.fromstring(drawn).iter(f"{SVG}title")]
    assert tips == ["a: 1, 10", "a: 10, 100", "a: 100, 1000", "b <&>: 10, 10"]


def test_what_has_no_place_on_a_log_axis_is_left_out() -> None:
    drawn = draw_lines([Line("a", [(0, 1), (1, float("nan")), (2, 3)])], x=Axis("x", log=True), y=Axis("y"))
    assert len(circles(drawn, "fill0")) == 1
    ElementTree.fromstring(draw_lines([Line("none", [])], x=Axis("x", log=True), y=Axis("y", log=True)))


@pytest.mark.parametrize("values", [(3.0, 4.0), (0.00012, 7000.0), (5.0, 5.0), (1e-9, 1e12)])
@pytest.mark.parametrize("log", [True, False])
def test_ticks_enclose_the_values_and_are_few(values: tuple[float, float], log: bool) -> None:
    drawn = draw_lines([Line("a", [(values[0], 1), (values[1], 2)])], x=Axis("x", log=log), y=Axis("y"))
    marked = [one for one in ElementTree.fromstring(drawn).iter(f"{SVG}text") if one.attrib.get("y") == "390.0"]
    assert 2 <= len(marked) <= 12
    for x, _ in circles(drawn, "fill0"):
        assert 75 < x < 741


def test_bars_are_as_long_as_their_parts_and_say_their_sum() -> None:
    drawn = draw_bars({"one": {"work": 1.0, "wait": 3.0}, "two": {"work": 2.0}}, title="t", show="{:g} s".format)
    bars = list(ElementTree.fromstring(drawn).iter(f"{SVG}rect"))
    work, wait, other = (float(bar.attrib["width"]) for bar in bars)
    assert (wait / work, other / work) == pytest.approx((3, 2), rel=0.01)
    assert float(bars[1].attrib["x"]) == pytest.approx(float(bars[0].attrib["x"]) + work, abs=0.2)
    assert [bar.attrib["class"] for bar in bars] == ["fill0", "fill1", "fill0"]
    assert {"one", "two", "4 s", "2 s", "work", "wait"} <= set(texts(drawn))


def test_a_page_asks_no_network_and_is_readable_in_the_dark() -> None:
    table = build_table(["a"], [["<b>"]])
    page = build_page("A <page>", [draw_bars({"x": {"y": 1}}), table])
    assert not re.findall(r"(?:src|href|url|@import)\b", page)
    assert set(re.findall(r"https?://[^\"' ]+", page)) == {"http://www.w3.org/2000/svg"}, "the name of SVG, not a place"
    assert "prefers-color-scheme: dark" in page
    assert "<td>&lt;b&gt;</td>" in page
    assert "<title>A &lt;page&gt;</title>" in page
    used = set(re.findall(r"var\((--\w+)\)", page))
    assert used <= set(re.findall(r"(--\w+):", page)), "every colour is one of the page's"
