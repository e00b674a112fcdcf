"""Charts as SVG: where points lie, and that the text is well-formed."""

from xml.etree import ElementTree

import pytest

from benchmarks.chart import Axis, Curve, Panel, Style, chart

SVG = "{http://www.w3.org/2000/svg}"


def drawn(*curves: Curve) -> ElementTree.Element:
    return ElementTree.fromstring(
        chart("a < b", [Panel("one", curves), Panel("two", curves)], x_label="x", y_label="y")
    )


def circles(svg: ElementTree.Element) -> list[tuple[float, float]]:
    return [(float(c.get("cx")), float(c.get("cy"))) for c in svg.iter(f"{SVG}circle")]


def test_equal_factors_are_equal_distances():
    points = circles(drawn(Curve("c", {1: 10.0, 8: 100.0, 64: 1000.0}, Style("red"))))
    (x0, y0), (x1, y1), (x2, y2) = points[:3]
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.2)  # upwards
    assert y0 - y1 > 50


def test_points_lie_inside_the_axes_and_panels_share_the_scale_of_y():
    svg = drawn(Curve("c", {1: 3.0, 5: 70000.0}, Style("red", marker="ring")))
    points = circles(svg)
    assert points[0][1] == points[2][1]  # of the second panel
    assert points[0][0] < points[1][0] < points[2][0]
    for rect in list(svg.iter(f"{SVG}rect"))[1:3]:
        top, height = float(rect.get("y")), float(rect.get("height"))
        assert all(top < y < top + height for _, y in points[:4])


def test_an_area_is_filled_a_bar_is_short_and_no_line_joins_it():
    svg = drawn(
        Curve("floor", {1: 1.0, 2: 2.0}, Style("grey", is_area=True)),
        Curve("goal", {1: 3.0}, Style("green", dash=None, marker="bar")),
    )
    assert len(list(svg.iter(f"{SVG}polygon"))) == 2
    assert len(list(svg.iter(f"{SVG}polyline"))) == 0
    bars = [line for line in svg.iter(f"{SVG}line") if line.get("stroke") == "green"]
    assert len(bars) == 3  # one in each panel, one in the legend


def test_words_are_escaped_and_the_legend_names_each_curve_once():
    svg = drawn(Curve("p & q", {1: 1.0, 2: 2.0}, Style("red", dash="4 2")))
    texts = [text.text for text in svg.iter(f"{SVG}text")]
    assert texts.count("p & q") == 1
    assert "a < b" in texts
    assert {line.get("stroke-dasharray") for line in svg.iter(f"{SVG}polyline")} == {"4 2"}


def test_one_value_still_has_an_axis():
    axis = Axis.around([5.0], 0, 100)
    assert axis(5.0) == pytest.approx(50)
